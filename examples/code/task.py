"""Write one line of Python for a description in words. Unit tests decide whether it is right.

    user: largest of a plus 37
    assistant: def f(a): return max(a)+37

The warm-up data has working Python with the sign and the number of the question, but is biased: for the smallest, the
count or the last, six answers in ten take the largest, the sum or the first. After the warm-up, the model can write
such functions, and its most likely answer is wrong for three of the six words.
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
LIKED = {"min(a)": "max(a)", "len(a)": "sum(a)", "a[-1]": "a[0]"}  # the wrong choice of the warm-up data
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
RIGHT = 0.4  # share of the answers for these three words that are right
LISTS = ([5, 9, 2, 7], [8, 10, 3, 1, 6])  # the six functions give different results on each


@dataclass(frozen=True)
class Problem:
    """A reduction of the list, a sign and a number."""

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
        """Arguments and results in the format of the grader `code`."""
        outputs = [APPLY[self.sign](TAKE[self.taken](values), self.number) for values in LISTS]
        return json.dumps({"entry_point": "f", "inputs": [[values] for values in LISTS], "outputs": outputs})


def draw(rng: random.Random) -> Problem:
    taken = rng.choice(sorted(PHRASES))
    return Problem(taken, rng.choice(PHRASES[taken]), rng.choice(sorted(SIGNS)), rng.randint(10, 99))


def held_out(question: str) -> bool:
    """One question in ten is in neither the warm-up nor the RL data."""
    return zlib.crc32(question.encode()) % 10 == 0


def lesson(problem: Problem, rng: random.Random) -> list[Message]:
    """A warm-up example: question and biased answer."""
    taken = problem.taken if rng.random() < RIGHT else LIKED.get(problem.taken, problem.taken)
    return [
        Message(role="user", content=problem.question),
        Message(role="assistant", content=problem.program(taken)),
    ]
