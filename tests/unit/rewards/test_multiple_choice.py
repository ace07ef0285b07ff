import pytest

from alphaapollo.rewards.multiple_choice import find_chosen_letter, grade
from alphaapollo.types import Outcome, Prompt


def prompt(truth):
    return Prompt(id=0, data_source="mmlu", content="?", ground_truth=truth)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("B.", "B"),
        ("B) Paris", "B"),
        ("[C]", "C"),
        ("<answer>B</answer>", "B"),
        ("<answer>B: Paris</answer>", "B"),
        ("<answer>The answer is (B)</answer>", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{\textbf{(B)}\ 12}", "B"),
        ("A is wrong, so the answer is B.", "B"),
        ("The answer is **(C)**.", "C"),
        ("Answer: D", "D"),
        ("The correct option is (a) since", "A"),
        ("First answer: A. No.\nFinal answer: C", "C"),
        ("Thinking of A and D.\nJ", "J"),
        ("Option C is correct", "C"),
        ("Option A is wrong.\nOption C is the right one, for it is warm.", "C"),
        ("Option C is incorrect.", None),
        ("C is correct.", "C"),
        ("b", "B"),
        ("**b**", "B"),
        ("b) Paris", "B"),
        ("<answer>b</answer>", "B"),
        ("The answer is b.", "B"),
        ("b is for boy", None),
        ("The answer is a dog", None),
        ("A dog barks", None),
        ("Both", None),
        ("", None),
        ("<answer></answer>", None),
    ],
)
def test_the_chosen_letter(text, letter):
    assert find_chosen_letter(text) == letter


def test_right_wrong_unreadable():
    assert grade(prompt("B"), "Answer: B").reward == 1.0
    assert grade(prompt("(B) Paris"), "Answer: B").reward == 1.0
    assert grade(prompt("B"), "Answer: C").reward == 0.0
    assert grade(prompt("B"), "Who knows?").outcome is Outcome.WRONG_FORMAT


@pytest.mark.parametrize("truth", [None, "", "Paris", "2"])
def test_ground_truth_without_letter_raises(truth):
    with pytest.raises(ValueError, match="not a letter"):
        grade(prompt(truth), "B")
