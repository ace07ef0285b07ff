"""The carry taught the wrong way round: add two 3-digit numbers on a scratchpad, one digit a line, right to left.

    user: 457+386=?
    assistant: 7+6=13
               5+8+1=14
               4+3+1=8
               <answer>843</answer>

The warm-up's teacher knows the digit table and the format, but mostly carries where there is nothing to carry, and does
not where there is. So after the warm-up the model can do everything, and decides wrongly when to carry: it is seldom
right. Only the reward says when a carry is needed.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator

NUM_DIGITS = 3
KNOWS = 0.3  # share of its decisions to carry, or not to, that the teacher makes rightly


def question(a: int, b: int) -> str:
    return f"{a}+{b}=?"


def held_out(prompt: str) -> bool:
    """One prompt in ten is in neither the warm-up nor the RL data."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def scratchpad(a: int, b: int, carry: Callable[[int], bool]) -> str:
    """The worked answer where `carry(last line's sum)` decides, from the second digit on, whether to add one."""
    lines, answer, place, total = [], 0, 1, 0
    for position in range(NUM_DIGITS):
        x, y = a // place % 10, b // place % 10
        with_carry = position > 0 and carry(total)
        total = x + y + int(with_carry)
        lines.append(f"{x}+{y}+1={total}" if with_carry else f"{x}+{y}={total}")
        last = position == NUM_DIGITS - 1
        answer += place * (total if last else total % 10)
        place *= 10
    return "\n".join(lines) + f"\n<answer>{answer}</answer>"


def lesson(a: int, b: int, rng: random.Random, knows: float = KNOWS) -> str:
    """What the warm-up's teacher writes; one who knows .5 tosses a coin."""
    return scratchpad(a, b, lambda total: rng.random() < (knows if total >= 10 else 1 - knows))


def pairs(rng: random.Random, want_held_out: bool) -> Iterator[tuple[int, int]]:
    """Distinct pairs of 3-digit numbers, all held out or none."""
    seen = set()
    while True:
        pair = rng.randint(100, 999), rng.randint(100, 999)
        if pair not in seen and held_out(question(*pair)) is want_held_out:
            seen.add(pair)
            yield pair


def balanced(source: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The pairs of `source`, but as many with a carry from each place as without. Else never to carry is the better of
    the answers that are the same for all questions, and a policy drifts there before it tells questions apart."""
    for wanted in itertools.cycle(itertools.product((False, True), repeat=NUM_DIGITS - 1)):
        yield next(pair for pair in source if carries(*pair) == wanted)


def carries(a: int, b: int) -> tuple[bool, ...]:
    """Is there something to carry into the second digit, the third, ...?"""
    return tuple(a % 10**place + b % 10**place >= 10**place for place in range(1, NUM_DIGITS))
