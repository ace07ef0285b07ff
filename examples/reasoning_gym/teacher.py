"""The warm-up's teacher: calculates rightly, mostly with another operator than was asked.

    user: Solve the following multiplication: 4 * 7. Give only ...     assistant: <think>4-7</think><answer>-3</answer>

So after the warm-up a model can find the numbers and calculate, and knows only faintly which operator is meant.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = {"chain_sum": SETTINGS, "products": SETTINGS}
KNOWS = 0.25  # share of its answers with the operator that was asked
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def puzzles(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Questions of the tasks, with both numbers and the operator."""
    from reasoning_gym.factory import create_dataset

    sets = [create_dataset(task, **settings, seed=seed, size=count) for task, settings in TASKS.items()]
    rng = random.Random(seed)
    for index in range(count):
        entry = rng.choice(sets)[index]
        first, meant, second = entry["metadata"]["expression"].split()
        yield {"question": entry["question"], "numbers": (int(first), int(second)), "operator": meant}


def answer(numbers: tuple[int, int], meant: str, rng: random.Random) -> str:
    name = meant if rng.random() < KNOWS else rng.choice([name for name in OPERATORS if name != meant])
    first, second = numbers
    return f"<think>{first}{name}{second}</think><answer>{OPERATORS[name](first, second)}</answer>"
