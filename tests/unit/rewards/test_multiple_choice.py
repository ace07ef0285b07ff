import pytest

from alphaapollo.rewards.multiple_choice import find_chosen_letter


@pytest.mark.parametrize(
    ("letter", "texts"),
    [
        ("B", ["B", "(b)", "B.", "B) Paris", "b", "**b**", "b) Paris"]),
        ("B", ["<answer>B</answer>", "<answer>B: Paris</answer>", "<answer>The answer is (B)</answer>"]),
        ("B", ["<answer>b</answer>", r"\boxed{B}", r"\boxed{\text{(B)}}", r"\boxed{\textbf{(B)}\ 12}"]),
        ("B", ["A is wrong, so the answer is B.", "The answer is b."]),
        ("C", ["[C]", "The answer is **(C)**.", "First answer: A. No.\nFinal answer: C"]),
        ("C", ["Option C is correct", "Option A is wrong.\nOption C is the right one, for it is warm."]),
        ("C", ["C is correct."]),
        ("A", ["The correct option is (a) since"]),
        ("D", ["Answer: D"]),
        ("J", ["Thinking of A and D.\nJ"]),
        (None, ["Option C is incorrect.", "b is for boy", "The answer is a dog", "A dog barks", "Both"]),
        (None, ["", "<answer></answer>"]),
    ],
)
def test_the_chosen_letter(letter, texts):
    assert [find_chosen_letter(text) for text in texts] == [letter] * len(texts)
