"""The teacher of the example quickstart."""

from __future__ import annotations

import random

import pytest

from examples.quickstart.task import lesson


@pytest.mark.parametrize(
    ("sum_", "rates", "written"),  # rates: of carries that are added, and of invented ones
    [
        ((457, 386), {"carry_rate": 1.0}, "7+6=13\n5+8+1=14\n4+3+1=8\n<answer>843</answer>"),
        ((457, 386), {"carry_rate": 0.0}, "7+6=13\n5+8=13\n4+3=7\n<answer>733</answer>"),
        ((111, 222), {}, "1+2=3\n1+2=3\n1+2=3\n<answer>333</answer>"),
        ((111, 222), {"wrong_carry_rate": 1.0}, "1+2=3\n1+2+1=4\n1+2+1=4\n<answer>443</answer>"),
    ],
)
def test_the_teacher_of_sums_forgets_or_invents_carries(
    sum_: tuple[int, int], rates: dict[str, float], written: str
) -> None:
    assert lesson(*sum_, random.Random(0), **rates) == written
