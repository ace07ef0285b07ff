"""The warm-up data of the calculator example depends on the question and mostly adds."""

import random
import re
from collections import Counter

import pytest

from examples.informal_math.task import CALLS, LIKED, PHRASES, RIGHT, Problem, compute, lesson

CALL = re.compile(r"<python_code>(\d+)([-+*])(\d+)</python_code>")


def test_teacher_prefers_addition_and_copies_correctly():
    rng, taken = random.Random(0), Counter()
    for operator, phrases in PHRASES.items():
        problem = Problem(37, 82, operator, phrases[0])
        for _ in range(400):
            chat = lesson(problem, rng)
            if call := CALL.fullmatch(chat[1]["content"]):
                a, chosen, b = int(call[1]), call[2], int(call[3])
                assert (a, b) == (37, 82)
                assert f'"text": "{compute(a, chosen, b)}"' in chat[2]["content"]
                assert chat[3]["content"] == f"<answer>\\boxed{{{compute(a, chosen, b)}}}</answer>"
                taken[operator, chosen] += 1
    assert set(taken) == {(one, one) for one in PHRASES} | {(one, LIKED) for one in PHRASES}
    assert sum(taken.values()) / 1200 == pytest.approx(CALLS, abs=0.05)
    for operator in set(PHRASES) - {LIKED}:
        right = taken[operator, operator]
        assert right / (right + taken[operator, LIKED]) == pytest.approx(RIGHT, abs=0.08)
