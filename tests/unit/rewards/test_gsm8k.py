"""Numbers in answers. test_audit.py compares the grader with labelled solutions."""

from fractions import Fraction

import pytest

from alphaapollo.rewards.short_answers import read_final_number


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        (72, ["#### 72"]),
        (1200, ["#### $1,200", r"\boxed{1.2 \times 10^{3}}"]),
        (1000, ["#### 1 000", "<answer>$1 000 a month</answer>", r"\boxed{1{,}000}", r"so $1\,000$", "#### 1e3"]),
        (-12, ["#### -12\nbye 5"]),
        (-5, ["x = -5", "(-5)", "-$5"]),
        (7, ["so she has 3 + 4 = 7 apples.", "<answer>\\boxed{7}</answer> 8"]),
        (3, ["5-3", "3 eggs", "3."]),
        (18, [r"\boxed{\$18}", "It is 18 (seen on 2024-05-31)."]),
        (Fraction(1, 2), [r"\boxed{\frac{1}{2}}", "1/2", ".5"]),
        (Fraction(-1, 2), [r"\boxed{-\frac{1}{2}}"]),
        (Fraction(1, 4), ["#### 2.5E-1"]),
        (Fraction(2469135, 2), ["1,234,567.50"]),
        (12345678, ["#### 12 345 678"]),
        (100, ["5 100"]),
        (2012, ["2024-12 = 2012"]),
        (50, ["50%"]),
        (None, ["1/0", "1e99999999999999", "1e201", "2024-05", "<answer>none</answer> 8", "no number", "", "3" * 5000]),
    ],
)
def test_the_final_number(number, texts):
    assert [read_final_number(text) for text in texts] == [number] * len(texts)
