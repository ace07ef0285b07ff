"""Which past steps a fresh prompt shows: env.context=memory.

    simple         the last n
    score          the n of best score
    ndimensional   the n of best rank sum over score and brevity, without duplicates

The newest step is always among them: without it the model would not know where it stands. All come in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from alphaapollo.types import Message

MemoryType = Literal["simple", "score", "ndimensional"]


@dataclass(frozen=True, slots=True)
class Step:
    """One action and what came of it."""

    action: str
    observation: list[Message]
    score: float = 0.0  # the step's reward


def select(steps: Sequence[Step], count: int, kind: MemoryType) -> list[Step]:
    """At most `count` steps, oldest first. count >= 1."""
    if not steps:
        return []
    *earlier, newest = range(len(steps))
    order = CHOICES[kind](steps, earlier)
    return [steps[index] for index in sorted([*order[: count - 1], newest])]


def _latest(steps: Sequence[Step], indices: Sequence[int]) -> list[int]:
    return sorted(indices, reverse=True)


def _best_score(steps: Sequence[Step], indices: Sequence[int]) -> list[int]:
    """Best first; of equal ones the later."""
    return sorted(indices, key=lambda index: (-steps[index].score, -index))


def _best_ranks(steps: Sequence[Step], indices: Sequence[int]) -> list[int]:
    """Lowest sum of the rank by score and the rank by length; of equal actions only the last one stands."""
    last = {steps[index].action: index for index in indices}
    unique = sorted(last.values())
    by_score = _ranks([-steps[index].score for index in unique])
    by_length = _ranks([len(steps[index].action) for index in unique])
    total = {index: by_score[place] + by_length[place] for place, index in enumerate(unique)}
    return sorted(unique, key=lambda index: (total[index], -index))


def _ranks(values: Sequence[float]) -> list[int]:
    """0 for the lowest; equal values share theirs."""
    places = {value: place for place, value in enumerate(sorted(set(values)))}
    return [places[value] for value in values]


CHOICES: dict[MemoryType, Callable[[Sequence[Step], Sequence[int]], list[int]]] = {
    "simple": _latest,
    "score": _best_score,
    "ndimensional": _best_ranks,
}
