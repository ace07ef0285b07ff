import time

import pytest

from alphaapollo.evaluation.answer_parsing import extract_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        ("7 + 5 = 12\n#### 12", "12"),
        ("<think>9</think><answer>the result is \\boxed{ 3/4 }</answer>", "3/4"),
        ("<answer> Paris </answer>", "paris"),
        ("That makes 1,200 dollars.", "1200"),
        ("12 + 30 = 42", "42"),
        (r"\boxed{1{,}200.00}", "1200"),
        (r"\boxed{\$1200}", "1200"),
        (r"\boxed{\dfrac{6}{8}}", "3/4"),
        (r"\boxed{-\frac{1}{2}}", "-1/2"),
        (r"\boxed{0.5}", "1/2"),
        (r"\boxed{-.5}", "-1/2"),
        (r"\boxed{\left( 1,\, 2 \right)}", "(1,2)"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{x = 3}", "x=3"),
        (r"\boxed{1/0}", "1/0"),
        (r"\boxed{10\%}", r"10\%"),
        ("no number here", "nonumberhere"),
        ("", None),
        (" \n", None),
        (r"\boxed{}", None),
        ("<answer></answer>", None),
        (r"\boxed{-}", "-"),
        ("ü" * 5, "üüüüü"),
    ],
)
def test_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("text", ["<answer>" * 130_000, "{" * 10**6, "1," * 500_000, "9" * 10**6, "\\boxed{" * 150_000])
def test_a_megabyte_of_repetition_takes_no_time(text: str) -> None:
    start = time.process_time()
    extract_answer(text)
    assert time.process_time() - start < 1.0
