"""The turns of a batch, as step-level estimators see them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from alphaapollo.algorithms.advantages import Turns
from alphaapollo.types import Trajectory, Turn


def number_turns(trajectories: Sequence[Trajectory], group_ids: torch.Tensor, mask: torch.Tensor) -> Turns:
    """Which turn each action token belongs to, and which turns start from the same state.

    Args:
        trajectories: N, whose rows are the B rows of the others, in order; each has one at least.
        group_ids: [B]
        mask: [B, L], column 0 is a row's first action token.
    """
    groups = group_ids.tolist()
    index = torch.full(mask.shape, -1, dtype=torch.int64)
    owners: list[int] = []
    anchors: dict[Hashable, int] = {}
    ids: list[int] = []
    number = 0
    for owner, trajectory in enumerate(trajectories):
        first = len(owners)
        for turn in trajectory.turns:
            owners.append(owner)
            ids.append(anchors.setdefault((groups[number], anchor(turn)), len(anchors)))
        for row in trajectory.rows:
            begin = 0
            for place, end in enumerate(row.turn_ends):
                end += 1 - row.response_start
                index[number, begin:end] = first + row.first_turn + place
                begin = end
            number += 1
    return Turns(index.where(mask.bool(), torch.tensor(-1)), torch.tensor(owners), torch.tensor(ids))


def anchor(turn: Turn) -> Hashable:
    """The state that an action was taken in: what the environment says (StepResult.info["state"]), else the tokens
    that it showed just before."""
    state = turn.info.get("state")
    return tuple(turn.context_ids) if state is None else repr(state)
