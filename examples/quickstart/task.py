"""Add two 3-digit numbers on a scratchpad, one digit per line, from right to left.

    user: 457+386=?
    assistant: 7+6=13
               5+8+1=14
               4+3+1=8
               <answer>843</answer>

The warm-up data has correct digits and the format, but lacks three of five carries. After the warm-up, the model can do
each step, but most likely omits a carry. Only the reward shows when to carry.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator

NUM_DIGITS = 3
CARRY_RATE = 0.4  # share of carries that are written in the warm-up data


def question(a: int, b: int) -> str:
    return f"{a}+{b}=?"


def held_out(prompt: str) -> bool:
    """One prompt in ten is in neither the warm-up nor the RL data."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def scratchpad(a: int, b: int, carry: Callable[[int], bool]) -> str:
    """Worked answer. From the second digit on, `carry(sum of the previous line)` decides whether to add one."""
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


def needs_carry(a: int, b: int) -> bool:
    return scratchpad(a, b, lambda total: total >= 10) != scratchpad(a, b, lambda total: False)


def lesson(a: int, b: int, rng: random.Random, carry_rate: float = CARRY_RATE, wrong_carry_rate: float = 0.0) -> str:
    """A warm-up example. wrong_carry_rate: probability of a wrong carry."""
    return scratchpad(a, b, lambda total: rng.random() < (carry_rate if total >= 10 else wrong_carry_rate))


def pairs(rng: random.Random, want_held_out: bool) -> Iterator[tuple[int, int]]:
    """Distinct pairs of 3-digit numbers, either all or none held out."""
    seen = set()
    while True:
        pair = rng.randint(100, 999), rng.randint(100, 999)
        if pair not in seen and held_out(question(*pair)) is want_held_out:
            seen.add(pair)
            yield pair
