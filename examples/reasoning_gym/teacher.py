"""The warm-up's teacher: calculates rightly, with an operator that it picks at random, whatever was asked.

    user: Solve the following multiplication: 4 * 7. Give only ...     assistant: <think>4-7</think><answer>-3</answer>

So after the warm-up a model can find the numbers and calculate, and does not know which operator is meant.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = {"chain_sum": SETTINGS, "products": SETTINGS}
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def puzzles(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Questions of the tasks, with both numbers."""
    from reasoning_gym.factory import create_dataset

    sets = [create_dataset(task, **settings, seed=seed, size=count) for task, settings in TASKS.items()]
    rng = random.Random(seed)
    for index in range(count):
        entry = rng.choice(sets)[index]
        first, _, second = entry["metadata"]["expression"].split()
        yield {"question": entry["question"], "numbers": (int(first), int(second))}


def answer(numbers: tuple[int, int], rng: random.Random) -> str:
    name = rng.choice(list(OPERATORS))
    first, second = numbers
    return f"<think>{first}{name}{second}</think><answer>{OPERATORS[name](first, second)}</answer>"
