"""The forgotten carry of the quickstart, and how to check it.

    user: 457+386=?              user: 457+386=?
    assistant: 7+6=13                  7+6=13
               5+8=13                  5+8=13
               4+3+1=8                 4+3+1=8
               <answer>833</answer>    <answer>833</answer>
                                       right?
                                 assistant: 10 11 no

A check has two digits for each step from a line to the next: was there a carry, and was it added? Both teachers are
careless: the one who adds forgets every second carry, the one who checks is wrong about one solution in ten. To add
without forgetting is not in the data; to see that something was forgotten is.
"""

from __future__ import annotations

import random

FORGETS = 0.5  # share of the carries that the adding teacher forgets
ERRS = 0.1  # share of the checks whose last word is the wrong one


def to_check(question: str, solution: str) -> str:
    return f"{question}\n{solution}\nright?"


def check(solution: str, rng: random.Random) -> str:
    """What the checking teacher says of a worked solution."""
    lines = solution.splitlines()[:-1]
    had = [int(line.rpartition("=")[2]) >= 10 for line in lines]
    added = [line.count("+") == 2 for line in lines]
    steps = [f"{int(carry)}{int(one)}" for carry, one in zip(had, added[1:], strict=False)]
    right = all(step[0] == step[1] for step in steps)
    return " ".join([*steps, "yes" if right != (rng.random() < ERRS) else "no"])
