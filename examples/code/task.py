"""Write the function that is meant: one line of Python, judged by running it against unit tests.

    user: largest of a plus 37
    assistant: def f(a): return max(a)+37

The warm-up's teacher writes working Python and takes the sign and the number from the question, but has likings: asked
for the smallest, the count or the last, it takes the largest, the sum or the first six times of ten. So after the
warm-up the model can write such functions, and its first choice for three words of six is the wrong one.
"""

from __future__ import annotations

import json
import operator
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from alphaapollo.types import Message

PHRASES = {
    "max(a)": ("largest of a", "greatest of a", "top of a"),
    "min(a)": ("smallest of a", "least of a", "bottom of a"),
    "sum(a)": ("sum of a", "total of a", "a added up"),
    "len(a)": ("size of a", "count of a", "a counted"),
    "a[0]": ("first of a", "start of a", "head of a"),
    "a[-1]": ("last of a", "end of a", "tail of a"),
}
LIKED = {"min(a)": "max(a)", "len(a)": "sum(a)", "a[-1]": "a[0]"}  # what the teacher rather takes
SIGNS = {"+": "plus", "-": "minus", "*": "times"}
TAKE: dict[str, Callable[[list[int]], int]] = {
    "max(a)": max,
    "min(a)": min,
    "sum(a)": sum,
    "len(a)": len,
    "a[0]": operator.itemgetter(0),
    "a[-1]": operator.itemgetter(-1),
}
APPLY: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
RIGHT = 0.4  # share of its answers to these three that mean the right thing
LISTS = ([5, 9, 2, 7], [8, 10, 3, 1, 6])  # on each of them all six are different


@dataclass(frozen=True)
class Problem:
    """What to take of the list, and what to do with it."""

    taken: str
    phrase: str
    sign: str
    number: int

    @property
    def question(self) -> str:
        return f"{self.phrase} {SIGNS[self.sign]} {self.number}"

    def program(self, taken: str) -> str:
        return f"def f(a): return {taken}{self.sign}{self.number}"

    @property
    def tests(self) -> str:
        """Arguments and results, as the grader `code` reads them."""
        outputs = [APPLY[self.sign](TAKE[self.taken](values), self.number) for values in LISTS]
        return json.dumps({"entry_point": "f", "inputs": [[values] for values in LISTS], "outputs": outputs})


def draw(rng: random.Random) -> Problem:
    taken = rng.choice(sorted(PHRASES))
    return Problem(taken, rng.choice(PHRASES[taken]), rng.choice(sorted(SIGNS)), rng.randint(10, 99))


def held_out(question: str) -> bool:
    """One question in ten is in neither the warm-up nor the RL data."""
    return zlib.crc32(question.encode()) % 10 == 0


def lesson(problem: Problem, rng: random.Random) -> list[Message]:
    """What the teacher says."""
    taken = problem.taken if rng.random() < RIGHT else LIKED.get(problem.taken, problem.taken)
    return [
        Message(role="user", content=problem.question),
        Message(role="assistant", content=problem.program(taken)),
    ]
