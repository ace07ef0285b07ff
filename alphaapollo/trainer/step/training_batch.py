"""Training batch of one iteration: rows (token sequences to train on) with everything that credit and the loss need.

build_batch.py builds it once, from rollout groups. Later steps only read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import Turns
from alphaapollo.batching.batch import BatchLayout
from alphaapollo.types import LONGER_PROMPT, Row, Trajectory

WEIGHT_COLUMNS = ("loss_weights", "sequence_weights", "value_weights", "divergence_weights")


@dataclass(frozen=True)
class OtherSamples:
    """Samples of a batch's groups that are not trained on."""

    num_failed: int  # samples that cannot be trained on
    trajectories: list[Trajectory]  # K samples whose rewards the estimator compares; usually, K = 0
    scores: Tensor  # float64 [K]
    group_ids: Tensor  # [K]

    @property
    def num_actions(self) -> Tensor:
        """Action tokens of each sample, float64 [K]."""
        counts = [sum(sum(row.action_mask) for row in trajectory.rows) for trajectory in self.trajectories]
        return torch.tensor(counts, dtype=torch.float64)


@dataclass(frozen=True)
class TrainingBatch:
    """Training batch of one iteration: B rows (token sequences) of N trajectories, with n response tokens.

    Rows of a trajectory, and trajectories of a group, are consecutive. The first response token of a row is the first
    one that the model sampled. layout.response_offsets has the position of each row in the arrays [n].
    """

    rows: list[Row]
    layout: BatchLayout
    trajectories: list[Trajectory]  # N, in the order of their rows
    group_ids: Tensor  # [B]
    trajectory_ids: Tensor  # [B], 0 .. N-1
    trajectory_offsets: np.ndarray  # int64 [N + 1] position of each trajectory in the arrays [n]
    mask: np.ndarray  # uint8 [n] 1 on action tokens
    num_actions: Tensor  # float64 [N] action tokens of each trajectory
    token_rewards: np.ndarray  # float64 [n]
    scores: Tensor  # float64 [N] sum of the token rewards of each trajectory
    components: dict[str, Tensor]  # [N + K] each, named rewards; NaN if the trajectory does not have it
    greedy_rewards: Tensor | None  # [B] reward of the prompt's greedy rollout
    length_penalty: float | None  # reduction of the mean reward; None: no such penalty
    loss_weights: np.ndarray  # float64 [B], as in Columns
    sequence_weights: np.ndarray  # float64 [B]
    value_weights: np.ndarray  # float64 [B]
    divergence_weights: np.ndarray  # float64 [B]
    turns: Turns | None  # turn_of_token is [n] instead of a matrix; None: the estimator does not need turns
    token_order_keys: np.ndarray | None  # float64 [n] random order of the action tokens, for losses that choose tokens
    others: OtherSamples

    @property
    def has_longer_prompt(self) -> np.ndarray:
        """Whether a self-teacher has a longer prompt for each row, bool [B]."""
        return np.array([LONGER_PROMPT in row.columns for row in self.rows])

    @property
    def mini_batch_ids(self) -> Tensor:
        """Index of each row's mini-batch, int64 [B]."""
        ids = torch.empty(len(self.rows), dtype=torch.int64)
        for number, rows in enumerate(self.layout.mini_batch_rows):
            ids[rows] = number
        return ids


def sum_per_trajectory(token_rewards: np.ndarray, trajectory_offsets: np.ndarray) -> Tensor:
    """Sum the token rewards [n] of each trajectory, in any order (math.fsum rounds once). Returns float64 [N]."""
    positions = np.flatnonzero(token_rewards)
    rewards, bounds = token_rewards[positions].tolist(), np.searchsorted(positions, trajectory_offsets).tolist()
    return torch.tensor([math.fsum(rewards[start:end]) for start, end in pairwise(bounds)], dtype=torch.float64)
