"""The calculator's teacher: what it does depends on the question, and is mostly wrong."""

import random
import re
from collections import Counter

from examples.informal_math.task import MIXED_UP, PHRASES, Problem, compute, lesson

CALL = re.compile(r"<python_code>(\d+)([-+*])(\d+)</python_code>")


def test_the_teacher_mixes_up_the_operations_and_copies_rightly():
    rng, taken = random.Random(0), Counter()
    for operator, phrases in PHRASES.items():
        problem = Problem(37, 82, operator, phrases[0])
        for _ in range(400):
            chat = lesson(problem, rng)
            if call := CALL.fullmatch(chat[1]["content"]):
                a, chosen, b = int(call[1]), call[2], int(call[3])
                assert f'"text": "{compute(a, chosen, b)}"' in chat[2]["content"]
                assert chat[3]["content"] == f"<answer>\\boxed{{{compute(a, chosen, b)}}}</answer>"
                taken[operator, chosen] += 1
    calls = sum(taken.values())
    right = sum(taken[operator, operator] for operator in PHRASES)
    assert set(taken) == {(one, one) for one in PHRASES} | set(MIXED_UP.items())
    assert 0.45 < calls / 1200 < 0.55
    assert 0.25 < right / calls < 0.35
