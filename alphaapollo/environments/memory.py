"""Select the past steps that a prompt shows, with env.context=memory.

    simple         the last n steps
    score          the n steps with the highest score
    ndimensional   the n steps with the best sum of ranks by score and brevity, without duplicates

The newest step is always included, because it shows the current state. Selected steps keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alphaapollo.types import Message

MemoryType = Literal["simple", "score", "ndimensional"]


@dataclass(frozen=True, slots=True)
class Step:
    """Past step: an action and the observation after it."""

    action: str
    observation: list[Message]
    score: float = 0.0  # the step's reward


def select_steps(steps: Sequence[Step], count: int, kind: MemoryType) -> list[Step]:
    """Return at most `count` (>= 1) steps, oldest first."""
    if not steps:
        return []
    *earlier, newest = range(len(steps))
    if kind == "simple":
        costs: dict[int, float] = dict.fromkeys(earlier, 0.0)
    elif kind == "score":
        costs = {index: -steps[index].score for index in earlier}
    else:
        costs = _compute_rank_sums(steps, earlier)
    order = sorted(costs, key=lambda index: (costs[index], -index))  # of steps with equal cost, the later one first
    return [steps[index] for index in sorted([*order[: count - 1], newest])]


def _compute_rank_sums(steps: Sequence[Step], indices: Sequence[int]) -> dict[int, float]:
    """Return the sum of the ranks by score and by length, per index. Of equal actions, only the last is included."""
    unique = {steps[index].action: index for index in indices}.values()
    scores = sorted({-steps[index].score for index in unique})
    lengths = sorted({len(steps[index].action) for index in unique})
    return {index: scores.index(-steps[index].score) + lengths.index(len(steps[index].action)) for index in unique}
