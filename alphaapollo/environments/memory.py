"""Selection of the past steps that a new prompt shows, with env.context=memory.

    simple         the last n
    score          the n with the best score
    ndimensional   the n with the best rank sum over score and brevity, without duplicates

The newest step is always included, because it shows the current state. Selected steps keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from alphaapollo.types import Message

MemoryType = Literal["simple", "score", "ndimensional"]


@dataclass(frozen=True, slots=True)
class Step:
    """One action and the observation after it."""

    action: str
    observation: list[Message]
    score: float = 0.0  # the step's reward


def select_steps(steps: Sequence[Step], count: int, kind: MemoryType) -> list[Step]:
    """At most `count` (>= 1) steps, oldest first."""
    if not steps:
        return []
    *earlier, newest = range(len(steps))
    order = RANKINGS[kind](steps, earlier)
    return [steps[index] for index in sorted([*order[: count - 1], newest])]


def _rank_by_age(steps: Sequence[Step], indices: Sequence[int]) -> list[int]:
    return sorted(indices, reverse=True)


def _rank_by_score(steps: Sequence[Step], indices: Sequence[int]) -> list[int]:
    """Best first; the later of equal ones first."""
    return sorted(indices, key=lambda index: (-steps[index].score, -index))


def _rank_by_score_and_length(steps: Sequence[Step], indices: Sequence[int]) -> list[int]:
    """Lowest sum of the ranks by score and by length first; of equal actions only the last is included."""
    last = {steps[index].action: index for index in indices}
    unique = sorted(last.values())
    by_score = _dense_ranks([-steps[index].score for index in unique])
    by_length = _dense_ranks([len(steps[index].action) for index in unique])
    total = {index: by_score[place] + by_length[place] for place, index in enumerate(unique)}
    return sorted(unique, key=lambda index: (total[index], -index))


def _dense_ranks(values: Sequence[float]) -> list[int]:
    """0 for the lowest; equal values have equal ranks."""
    places = {value: place for place, value in enumerate(sorted(set(values)))}
    return [places[value] for value in values]


RANKINGS: dict[MemoryType, Callable[[Sequence[Step], Sequence[int]], list[int]]] = {
    "simple": _rank_by_age,
    "score": _rank_by_score,
    "ndimensional": _rank_by_score_and_length,
}
