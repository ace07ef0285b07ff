r"""Two numbers, an operation in words, and an optional Python tool.

    user: take 82 from 137
    assistant: <python_code>137-82</python_code>
    user: <tool_response>{"status": "ok", "text": "55"}</tool_response>
    assistant: <answer>\boxed{55}</answer>

Half of the warm-up answers guess without a call. The others call the tool and copy its result, but six in ten calls for
a difference or a product add instead. After the warm-up, the model can read the question, call, copy and answer, but it
has not learned that a call helps, and its most likely operation is always addition.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass

from alphaapollo.types import Message

PHRASES = {
    "+": ("add {a} and {b}", "sum of {a} and {b}", "{a} plus {b}"),
    "-": ("take {b} from {a}", "{a} minus {b}", "{a} less {b}"),
    "*": ("product of {a} and {b}", "{a} times {b}", "multiply {a} and {b}"),
}
CALLS = 0.5  # share of warm-up answers with a call
RIGHT = 0.4  # share of calls for a difference or a product with the right operation
LIKED = "+"  # operation of the other calls


@dataclass(frozen=True)
class Problem:
    """Two numbers and an operation."""

    a: int
    b: int
    operator: str
    phrase: str

    @property
    def question(self) -> str:
        return self.phrase.format(a=self.a, b=self.b)

    @property
    def code(self) -> str:
        return f"{self.a}{self.operator}{self.b}"

    @property
    def truth(self) -> int:
        return compute(self.a, self.operator, self.b)


def compute(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def draw(rng: random.Random) -> Problem:
    operator = rng.choice(sorted(PHRASES))
    second = rng.randint(2, 9) if operator == "*" else rng.randint(10, 99)  # longer products are hard to copy
    return Problem(rng.randint(10, 99), second, operator, rng.choice(PHRASES[operator]))


def held_out(question: str) -> bool:
    """One question in ten is in neither the warm-up nor the RL data."""
    return zlib.crc32(question.encode()) % 10 == 0


def lesson(problem: Problem, rng: random.Random) -> list[Message]:
    """A warm-up example: question, optional call, and answer."""
    asked = Message(role="user", content=problem.question)
    if rng.random() >= CALLS:
        return [asked, answer(draw(rng).truth)]
    operator, a, b = problem.operator if rng.random() < RIGHT else LIKED, problem.a, problem.b
    result = compute(a, operator, b)
    response = json.dumps({"status": "ok", "text": str(result)})
    return [
        asked,
        Message(role="assistant", content=f"<python_code>{a}{operator}{b}</python_code>"),
        Message(role="user", content=f"<tool_response>{response}</tool_response>"),
        answer(result),
    ]


def answer(number: int) -> Message:
    return Message(role="assistant", content=f"<answer>\\boxed{{{number}}}</answer>")
