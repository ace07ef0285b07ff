import pytest

from alphaapollo.rewards.short_answers import find_chosen_letters


@pytest.mark.parametrize(
    ("letters", "texts"),
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
        ("AC", ["A, C", "AC", "C, A", "(A) and (C)", '["A", "C"]', "a, c", "A; C", "A and C are correct", "[A, C]"]),
        ("AC", ["The answers are A and C.", "<answer>AC</answer>", r"\boxed{A}, \boxed{C}", r"$\boxed{\text{A, C}}$"]),
        ("AC", ["The correct options are: A, C", "<answer>A. Paris, C. Rome</answer>", "Hm.\nA, C because of that"]),
        ("ABCD", ["A, B, C, and D", "ABCD"]),
        ("B", ["B, because A is wrong", "B, A is wrong", "<answer>B. Paris, the capital</answer>"]),
        ("", ["A or B", "AA", "BAD dog", "A dog and a cat"]),
        ("", ["Option C is incorrect.", "b is for boy", "The answer is a dog", "A dog barks", "Both"]),
        ("", ["", "<answer></answer>"]),
    ],
)
def test_the_chosen_letter(letters, texts):
    assert [find_chosen_letters(text) for text in texts] == [letters] * len(texts)
