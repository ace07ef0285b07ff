"""Join the rows of each trajectory into one sequence.

In memory context a trajectory has one row per turn, but credit assignment and sequence-level ratios cover the whole
trajectory. Computations across tokens therefore work on [N, K], one row per trajectory:

    rows [B, L] --join--> trajectories [N, K] --recursion or mean over the sequence--> [N, K] --split--> [B, L]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphaapollo.algorithms.group_statistics import Groups
from alphaapollo.algorithms.masked import apply_mask

Cells = tuple[Tensor, Tensor]  # row and column indices of n cells of a matrix, int64 [n] each


@dataclass(frozen=True)
class JoinedTrajectories:
    """N trajectories as rows of one matrix, in the order of their ids; the rows of a trajectory keep their order.

    Example: rows with masks [1, 0, 1] and [1, 1, 0] of one trajectory become one row of 4 tokens. If every
    trajectory has one row (append context), rows are unchanged.
    """

    mask: Tensor  # [N, K] 1 on action tokens
    rows: Groups  # trajectory of each row; index [B]
    row_mask: Tensor  # [B, L]
    cells: tuple[Cells, Cells] | None  # action tokens in [B, L] and in [N, K]; None if the rows are unchanged

    @classmethod
    def from_mask(cls, mask: Tensor, trajectory_ids: Tensor) -> JoinedTrajectories:
        """Create from an action mask [B, L] and trajectory ids [B] (any integers)."""
        rows = Groups.from_ids(trajectory_ids)
        if torch.equal(rows.index, torch.arange(len(mask), device=mask.device)):
            return cls(mask, rows, mask, None)
        row, column = mask.bool().nonzero(as_tuple=True)
        order = rows.index[row].argsort(stable=True)
        owner = rows.index[row[order]]
        counts = torch.bincount(owner, minlength=1)
        column_index = torch.arange(len(owner), device=mask.device) - (counts.cumsum(0) - counts)[owner]
        joined = mask.new_zeros(len(rows.sizes), int(column_index.max()) + 1 if len(column_index) else 1)
        joined[owner, column_index] = 1
        return cls(joined, rows, mask, ((row[order], column[order]), (owner, column_index)))

    def join(self, values: Tensor) -> Tensor:
        """Convert values of rows to values of trajectories, zero off the mask; differentiable. [B, L] -> [N, K]."""
        if self.cells is None:
            return apply_mask(values, self.mask)
        row_cells, joined_cells = self.cells
        return values.new_zeros(self.mask.shape).index_put(joined_cells, values[row_cells])

    def split(self, values: Tensor) -> Tensor:
        """Convert values of trajectories to values of rows, zero off the mask; differentiable. [N, K] -> [B, L]."""
        if self.cells is None:
            return apply_mask(values, self.mask)
        row_cells, joined_cells = self.cells
        return values.new_zeros(self.row_mask.shape).index_put(row_cells, values[joined_cells])
