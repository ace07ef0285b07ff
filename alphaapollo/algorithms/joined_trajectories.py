"""Rows of a trajectory joined into one sequence.

In memory context a trajectory has one row per turn, but credit assignment and sequence-level ratios cover the whole
trajectory. Computations across tokens therefore work on [N, K], one row per trajectory:

    rows [B, L] --join--> trajectories [N, K] --recursion or mean over the sequence--> [N, K] --split--> [B, L]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import masked


@dataclass(frozen=True)
class TokenPositions:
    """Positions of the n action tokens in [B, L] and in [N, K]. int64 [n] each"""

    rows: Tensor  # in [B, L]
    columns: Tensor
    owners: Tensor  # in [N, K]
    places: Tensor

    @classmethod
    def of(cls, mask: Tensor, index: Tensor) -> TokenPositions:
        rows, columns = mask.bool().nonzero(as_tuple=True)
        order = index[rows].argsort(stable=True)
        rows, columns = rows[order], columns[order]
        owners = index[rows]
        counts = torch.bincount(owners, minlength=1)
        places = torch.arange(len(rows), device=mask.device) - (counts.cumsum(0) - counts)[owners]
        return cls(rows, columns, owners, places)


@dataclass(frozen=True)
class JoinedTrajectories:
    """N trajectories in the order of their ids. Rows of a trajectory keep their order, the order of turns.

    Example: rows with masks [1, 0, 1] and [1, 1, 0] of one trajectory become one row of 4 tokens. If every
    trajectory has one row (append context), rows are unchanged.
    """

    mask: Tensor  # [N, K] 1 on action tokens
    index: Tensor  # int64 [B], the trajectory of each row, 0 .. N-1
    row_mask: Tensor  # [B, L]
    cells: TokenPositions | None  # None: rows are unchanged

    @classmethod
    def of(cls, mask: Tensor, trajectory_ids: Tensor) -> JoinedTrajectories:
        """Build from mask [B, L] and trajectory_ids [B] (any integers)."""
        ids, index = torch.unique(trajectory_ids, return_inverse=True)
        if torch.equal(index, torch.arange(len(mask), device=mask.device)):
            return cls(mask, index, mask, None)
        cells = TokenPositions.of(mask, index)
        longest = int(cells.places.max()) + 1 if len(cells.places) else 1
        joined = mask.new_zeros(len(ids), longest)
        joined[cells.owners, cells.places] = 1
        return cls(joined, index, mask, cells)

    def join(self, values: Tensor) -> Tensor:
        """Join rows: [B, L] -> [N, K], zero off the mask; differentiable."""
        if self.cells is None:
            return masked(values, self.mask)
        flat = values[self.cells.rows, self.cells.columns]
        return values.new_zeros(self.mask.shape).index_put((self.cells.owners, self.cells.places), flat)

    def split(self, values: Tensor) -> Tensor:
        """Split trajectories: [N, K] -> [B, L], zero off the mask; differentiable."""
        if self.cells is None:
            return masked(values, self.mask)
        flat = values[self.cells.owners, self.cells.places]
        return values.new_zeros(self.row_mask.shape).index_put((self.cells.rows, self.cells.columns), flat)

    def per_trajectory(self, values: Tensor) -> Tensor:
        """Take one value per trajectory; equal on all its rows. [B] -> [N]."""
        first = values.new_empty(len(self.mask))
        first[self.index] = values
        return first
