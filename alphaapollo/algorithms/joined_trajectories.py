"""The rows of a trajectory laid end to end.

In memory context a trajectory has a row a turn. Credit runs across its turns all the same, and a ratio of its whole
sequence is of all its rows. So whatever looks beyond single tokens works on [N, K], a row a trajectory:

    rows [B, L] --join--> trajectories [N, K] --a recursion, a mean over the sequence--> [N, K] --split--> [B, L]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import masked


@dataclass(frozen=True)
class TokenPositions:
    """Of each of the n action tokens, int64 [n]: its cell in [B, L], and that in [N, K]."""

    rows: Tensor
    columns: Tensor
    owners: Tensor
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
    """N trajectories in the order of their ids. Rows of a trajectory keep their order, which is that of its turns.

    Example: rows with masks [1, 0, 1] and [1, 1, 0] of one trajectory become one row of 4 tokens. Where every
    trajectory has one row (append context) the rows stay as they are.
    """

    mask: Tensor  # [N, K] 1 on action tokens
    index: Tensor  # int64 [B], the trajectory of each row, 0 .. N-1
    row_mask: Tensor  # [B, L]
    cells: TokenPositions | None  # None: the rows stay as they are

    @classmethod
    def of(cls, mask: Tensor, trajectory_ids: Tensor) -> JoinedTrajectories:
        """mask [B, L], trajectory_ids [B] of any integers."""
        ids, index = torch.unique(trajectory_ids, return_inverse=True)
        if torch.equal(index, torch.arange(len(mask), device=mask.device)):
            return cls(mask, index, mask, None)
        cells = TokenPositions.of(mask, index)
        longest = int(cells.places.max()) + 1 if len(cells.places) else 1
        joined = mask.new_zeros(len(ids), longest)
        joined[cells.owners, cells.places] = 1
        return cls(joined, index, mask, cells)

    def join(self, values: Tensor) -> Tensor:
        """[B, L] -> [N, K], zero off the mask; differentiable."""
        if self.cells is None:
            return masked(values, self.mask)
        flat = values[self.cells.rows, self.cells.columns]
        return values.new_zeros(self.mask.shape).index_put((self.cells.owners, self.cells.places), flat)

    def split(self, values: Tensor) -> Tensor:
        """[N, K] -> [B, L], zero off the mask; differentiable."""
        if self.cells is None:
            return masked(values, self.mask)
        flat = values[self.cells.owners, self.cells.places]
        return values.new_zeros(self.row_mask.shape).index_put((self.cells.rows, self.cells.columns), flat)

    def per_trajectory(self, values: Tensor) -> Tensor:
        """[B], the same on all rows of a trajectory -> [N]."""
        first = values.new_empty(len(self.mask))
        first[self.index] = values
        return first
