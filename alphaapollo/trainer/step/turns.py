"""Turns of the trajectories of a batch: their positions in the tokens, their numbers, and random token orders."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from alphaapollo.algorithms.advantages import Turns
from alphaapollo.types import Trajectory, Turn
from alphaapollo.utils.seeds import derive_seed


class TrainedTurn(NamedTuple):
    """Turn that is trained on, and the positions of its action tokens in the arrays [n] of response tokens."""

    turn: Turn
    start: int
    end: int


def list_trained_turns(trajectories: Sequence[Trajectory], response_offsets: np.ndarray) -> list[list[TrainedTurn]]:
    """Return the turns in the rows of each trajectory, in the order in which the model sampled them.

    response_offsets: [B + 1] position of each row's first response token.
    """
    ends = iter(response_offsets[1:].tolist())
    turns_by_trajectory: list[list[TrainedTurn]] = []
    for trajectory in trajectories:
        trained = []
        for row in trajectory.rows:
            first_token = next(ends) - len(row.token_ids)  # its position if [n] contained the prompt
            turns = trajectory.turns[row.first_turn : row.first_turn + len(row.turn_ends)]
            for turn, last_action in zip(turns, row.turn_ends, strict=True):
                end = first_token + last_action + 1
                trained.append(TrainedTurn(turn, end - len(turn.completion.token_ids), end))
        is_sorted = len(trained) == 1
        turns_by_trajectory.append(trained if is_sorted else sorted(trained, key=lambda each: each.turn.answer_number))
    return turns_by_trajectory


def number_turns(turns_by_trajectory: Sequence[list[TrainedTurn]], group_ids: Sequence[int], mask: np.ndarray) -> Turns:
    """Number the trained turns of a batch in the order of sampling, and find turns that start from the same state.

    Args:
        turns_by_trajectory: N lists. group_ids: [N], equal ones are consecutive.
        mask: [n], 1 on action tokens.

    Returns turns whose turn_of_token is [n].
    """
    turn_of_token = np.full(len(mask), -1)
    owners: list[int] = []
    anchor_ids: list[int] = []
    anchors: dict[Hashable, int] = {}  # for one group at a time, because keys may be long
    num_anchors = 0
    for owner, turns in enumerate(turns_by_trajectory):
        if owner and group_ids[owner] != group_ids[owner - 1]:
            num_anchors, anchors = num_anchors + len(anchors), {}
        for turn, start, end in turns:
            turn_of_token[start:end] = len(owners)
            owners.append(owner)
            anchor_ids.append(num_anchors + anchors.setdefault(_get_anchor_state(turn), len(anchors)))
    turn_of_token[mask == 0] = -1
    return Turns(torch.from_numpy(turn_of_token), torch.tensor(owners), torch.tensor(anchor_ids))


def _get_anchor_state(turn: Turn) -> Hashable:
    """Return the environment's state before a turn: StepResult.info["state"], else the turn's context tokens."""
    state = turn.info.get("state")
    return tuple(turn.context_ids) if state is None else repr(state)


def draw_token_order(
    trajectories: Sequence[Trajectory], turns: Sequence[list[TrainedTurn]], num_tokens: int, run_seed: int, step: int
) -> np.ndarray:
    """Draw a random number in [0, 1) per action token. Returns [n]. Each trajectory has a seed of its own."""
    noise = np.zeros(num_tokens)
    for trajectory, trained in zip(trajectories, turns, strict=True):
        seed = derive_seed(run_seed, "choice", step, trajectory.prompt_id, trajectory.sample)
        generator = np.random.default_rng(seed)
        for _, start, end in trained:
            noise[start:end] = generator.random(end - start)
    return noise
