"""Additions with missing carries, and checks of them.

    user: 457+386=?              user: 457+386=?
    assistant: 7+6=13                  7+6=13
               5+8=13                  5+8=13
               4+3+1=8                 4+3+1=8
               <answer>833</answer>    <answer>833</answer>
                                       right?
                                 assistant: 10 11 no

A check has two digits for each step from a line to the next: was there a carry, and was it added? The training data of
both kinds has errors: every second carry is missing, and one check in ten ends with the wrong word. The data shows how
to find a missing carry, but never how to add all of them.
"""

from __future__ import annotations

import random

MISSING_CARRIES = 0.5  # share of carries that are missing in training solutions
WRONG_VERDICTS = 0.1  # share of training checks with the wrong last word


def check_prompt(question: str, solution: str) -> str:
    return f"{question}\n{solution}\nright?"


def write_check(solution: str, rng: random.Random) -> str:
    """Check of a worked solution, with the wrong verdict in a share WRONG_VERDICTS of the cases."""
    lines = solution.splitlines()[:-1]
    had_carry = [int(line.rpartition("=")[2]) >= 10 for line in lines]
    added_carry = [line.count("+") == 2 for line in lines]
    steps = [f"{int(had)}{int(added)}" for had, added in zip(had_carry, added_carry[1:], strict=False)]
    is_right = all(step[0] == step[1] for step in steps)
    return " ".join([*steps, "yes" if is_right != (rng.random() < WRONG_VERDICTS) else "no"])
