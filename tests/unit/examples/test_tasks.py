"""Tasks and teachers of the examples quickstart, curriculum and informal_math."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import islice

import pytest

from examples.curriculum.make_task import long_sums, sums
from examples.informal_math import task as informal_math
from examples.quickstart.task import held_out, lesson, needs_carry, question

CALL = re.compile(r"<python_code>(\d+)([-+*])(\d+)</python_code>")


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


def test_three_kinds_of_sums() -> None:
    for with_carry in (True, False):
        pairs = list(islice(sums(random.Random(1), with_carry), 20))
        assert all(needs_carry(*pair) is with_carry and not held_out(question(*pair)) for pair in pairs)
    assert all(1000 <= number <= 9999 for pair in islice(long_sums(random.Random(1)), 20) for number in pair)


def test_teacher_of_the_calculator_prefers_addition_and_copies_correctly() -> None:
    rng, taken = random.Random(0), Counter[tuple[str, str]]()
    for operator, phrases in informal_math.PHRASES.items():
        problem = informal_math.Problem(37, 82, operator, phrases[0])
        for _ in range(400):
            chat = informal_math.lesson(problem, rng)
            if call := CALL.fullmatch(chat[1]["content"]):
                result = informal_math.compute(37, call[2], 82)
                assert (call[1], call[3]) == ("37", "82")
                assert f'"text": "{result}"' in chat[2]["content"]
                assert chat[3]["content"] == f"<answer>\\boxed{{{result}}}</answer>"
                taken[operator, call[2]] += 1
    operators, liked = set(informal_math.PHRASES), informal_math.LIKED
    assert set(taken) == {(one, one) for one in operators} | {(one, liked) for one in operators}
    assert sum(taken.values()) / 1200 == pytest.approx(informal_math.CALLS, abs=0.05)
    for one in operators - {liked}:
        assert taken[one, one] / (taken[one, one] + taken[one, liked]) == pytest.approx(informal_math.RIGHT, abs=0.08)
