"""With env.context=memory, select the past steps of an episode that the prompt of the next turn shows.

    env.memory_type=simple         the last n steps
                    score          the n steps with the highest score
                    ndimensional   the n steps with the best sum of two ranks: by score, and by length of the action
                                   (short is good); of steps with equal actions, only the last counts

The newest step is always included, because it shows the current state. Selected steps keep their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alphaapollo.types import Message

MemoryType = Literal["simple", "score", "ndimensional"]


@dataclass(frozen=True, slots=True)
class Step:
    """Past step of an episode: an action of the model and the observation after it."""

    action: str
    observation: list[Message]
    score: float = 0.0  # the step's reward


def select_steps(steps: Sequence[Step], count: int, memory_type: MemoryType) -> list[Step]:
    """Return at most `count` (>= 1) steps in their order: the newest, and the best of the others by `memory_type`."""
    if not steps:
        return []
    *earlier, newest = range(len(steps))
    if memory_type == "simple":
        costs: dict[int, float] = dict.fromkeys(earlier, 0.0)
    elif memory_type == "score":
        costs = {index: -steps[index].score for index in earlier}
    else:
        costs = _sum_score_and_length_ranks(steps, earlier)
    order = sorted(costs, key=lambda index: (costs[index], -index))  # of steps with equal cost, the later one first
    return [steps[index] for index in sorted([*order[: count - 1], newest])]


def _sum_score_and_length_ranks(steps: Sequence[Step], indices: Sequence[int]) -> dict[int, float]:
    """Return {step index: score rank (0: best) + length rank (0: shortest)}, for the last step of each action."""
    unique = {steps[index].action: index for index in indices}.values()
    scores = sorted({-steps[index].score for index in unique})
    lengths = sorted({len(steps[index].action) for index in unique})
    return {index: scores.index(-steps[index].score) + lengths.index(len(steps[index].action)) for index in unique}
