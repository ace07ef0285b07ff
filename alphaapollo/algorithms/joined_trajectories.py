"""Join the rows (token sequences) of each trajectory into one row, and split results again.

If the environment starts a new prompt each turn (memory context), a trajectory has one row per turn. Rewards-to-go and
sequence-level ratios cover the whole trajectory, so they are computed on one row per trajectory:

    rows [B, L] --join--> trajectories [N, K] --recursion or mean over tokens--> [N, K] --split--> rows [B, L]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphaapollo.algorithms.group_statistics import Groups
from alphaapollo.algorithms.masked import apply_mask

TokenPositions = tuple[Tensor, Tensor]  # row and column of n tokens in a matrix, int64 [n] each


@dataclass(frozen=True)
class JoinedTrajectories:
    """Mapping between B token sequences (rows) and N trajectories, each with all its action tokens in one row.

    Example: rows with masks [1, 0, 1] and [1, 1, 0] of one trajectory become one row of 4 tokens. Trajectories are in
    the order of their ids. The rows of a trajectory keep their order, unless the order in time is given.
    """

    mask: Tensor  # [N, K] 1 on action tokens
    rows_by_trajectory: Groups  # groups the B rows by trajectory
    row_mask: Tensor  # [B, L]
    token_positions: tuple[TokenPositions, TokenPositions] | None  # of action tokens, in [B, L] and in [N, K]
    """None if every trajectory has one row, so that joining and splitting change nothing."""

    @classmethod
    def from_mask(cls, mask: Tensor, trajectory_ids: Tensor, times: Tensor | None = None) -> JoinedTrajectories:
        """Create the mapping from the action mask [B, L] and the trajectory id [B] (any integer) of each row.

        times: int64 [B, L], by which the action tokens of a trajectory are sorted; equal ones keep their order.
        """
        rows = Groups.from_ids(trajectory_ids)
        if torch.equal(rows.group_index, torch.arange(len(mask), device=mask.device)):
            return cls(mask, rows, mask, None)
        row, column = mask.bool().nonzero(as_tuple=True)
        if times is not None:
            by_time = times[row, column].argsort(stable=True)
            row, column = row[by_time], column[by_time]
        order = rows.group_index[row].argsort(stable=True)
        owner = rows.group_index[row[order]]
        counts = torch.bincount(owner, minlength=1)
        column_index = torch.arange(len(owner), device=mask.device) - (counts.cumsum(0) - counts)[owner]
        joined = mask.new_zeros(len(rows.sizes), int(column_index.max()) + 1 if len(column_index) else 1)
        joined[owner, column_index] = 1
        return cls(joined, rows, mask, ((row[order], column[order]), (owner, column_index)))

    def join(self, values: Tensor) -> Tensor:
        """Copy values of action tokens from rows to trajectories; 0 elsewhere. Differentiable. [B, L] -> [N, K]."""
        if self.token_positions is None:
            return apply_mask(values, self.mask)
        in_rows, in_trajectories = self.token_positions
        return values.new_zeros(self.mask.shape).index_put(in_trajectories, values[in_rows])

    def split(self, values: Tensor) -> Tensor:
        """Split values of trajectories to values of rows; 0 outside the mask. Differentiable. [N, K] -> [B, L]."""
        if self.token_positions is None:
            return apply_mask(values, self.mask)
        in_rows, in_trajectories = self.token_positions
        return values.new_zeros(self.row_mask.shape).index_put(in_rows, values[in_trajectories])
