"""The forgotten carry: add two 3-digit numbers on a scratchpad, one digit a line, right to left.

    user: 457+386=?
    assistant: 7+6=13
               5+8+1=14
               4+3+1=8
               <answer>843</answer>

The warm-up's teacher knows the digit table and the format, but forgets three carries of five. So after the warm-up the
model can do everything, and the most likely thing that it does is not to carry. Only the reward says when to.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator

NUM_DIGITS = 3
REMEMBERS = 0.4  # share of the carries that the teacher does not forget


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


def lesson(a: int, b: int, rng: random.Random, remembers: float = REMEMBERS, invents: float = 0.0) -> str:
    """What the warm-up's teacher writes. invents: share of its carries where there is nothing to carry."""
    return scratchpad(a, b, lambda total: rng.random() < (remembers if total >= 10 else invents))


def pairs(rng: random.Random, want_held_out: bool) -> Iterator[tuple[int, int]]:
    """Distinct pairs of 3-digit numbers, all held out or none."""
    seen = set()
    while True:
        pair = rng.randint(100, 999), rng.randint(100, 999)
        if pair not in seen and held_out(question(*pair)) is want_held_out:
            seen.add(pair)
            yield pair
