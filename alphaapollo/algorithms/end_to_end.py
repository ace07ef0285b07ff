"""The rows of a trajectory laid end to end.

In memory context a trajectory has a row a turn. Credit runs across its turns all the same, and a ratio of its whole
sequence is of all its rows. So whatever looks beyond single tokens works on [N, K], a row a trajectory:

    rows [B, L] --join--> trajectories [N, K] --a recursion, a mean over the sequence--> [N, K] --split--> [B, L]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EndToEnd:
    """Where each action token stands in its trajectory; N trajectories in the order of their ids, K = the most action
    tokens of one. Rows of a trajectory keep their order, which is that of its turns; other tokens are left out.

    Example: rows with masks [1, 0, 1] and [1, 1, 0] of one trajectory become one row of 4 tokens.
    """

    rows: Tensor  # int64 [n], of each of the n action tokens, like the three below
    columns: Tensor
    owners: Tensor  # its trajectory, 0 .. N-1
    places: Tensor  # its place in it, 0 .. K-1
    index: Tensor  # int64 [B], the trajectory of each row, 0 .. N-1
    row_mask: Tensor  # [B, L]
    mask: Tensor  # [N, K] 1 on action tokens

    @classmethod
    def of(cls, mask: Tensor, trajectory_ids: Tensor) -> EndToEnd:
        """mask [B, L], trajectory_ids [B] of any integers."""
        ids, index = torch.unique(trajectory_ids, return_inverse=True)
        rows, columns = mask.bool().nonzero(as_tuple=True)
        order = index[rows].argsort(stable=True)
        rows, columns = rows[order], columns[order]
        owners = index[rows]
        counts = torch.bincount(owners, minlength=len(ids))
        places = torch.arange(len(rows), device=mask.device) - (counts.cumsum(0) - counts)[owners]
        joined = mask.new_zeros(len(ids), max(1, int(counts.max())))
        joined[owners, places] = 1
        return cls(rows, columns, owners, places, index, mask, joined)

    def join(self, values: Tensor) -> Tensor:
        """[B, L] -> [N, K], zero beyond each trajectory's end; differentiable."""
        flat = values[self.rows, self.columns]
        return values.new_zeros(self.mask.shape).index_put((self.owners, self.places), flat)

    def split(self, values: Tensor) -> Tensor:
        """[N, K] -> [B, L], zero off the mask; differentiable."""
        flat = values[self.owners, self.places]
        return values.new_zeros(self.row_mask.shape).index_put((self.rows, self.columns), flat)

    def per_trajectory(self, values: Tensor) -> Tensor:
        """[B], the same on all rows of a trajectory -> [N]."""
        first = values.new_empty(len(self.mask))
        first[self.index] = values
        return first
