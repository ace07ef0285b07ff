"""Statistics of groups (the samples of one prompt)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Singleton = Literal["zero", "raw"]


@dataclass(frozen=True)
class Groups:
    """Group membership of N samples.

    Example: `Groups.of(torch.tensor([7, 7, 9]))` has index [0, 0, 1] and sizes [2, 1].
    """

    index: Tensor  # [N] int64, 0 .. G-1
    sizes: Tensor  # [G] int64

    @classmethod
    def of(cls, ids: Tensor) -> Groups:
        _, index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    def sum(self, values: Tensor) -> Tensor:
        """Sum per group. [N] -> [G]."""
        return values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean per group. [N] -> [G]."""
        return self.sum(values) / self.sizes

    def max(self, values: Tensor) -> Tensor:
        """Maximum per group. [N] -> [G]."""
        return values.new_zeros(len(self.sizes)).scatter_reduce_(0, self.index, values, "amax", include_self=False)

    def equal(self, values: Tensor) -> Tensor:
        """Whether all values of a group are equal; True for a group of one. [N] -> [G] bool.

        Tests max == min, because means and standard deviations have rounding errors.
        """
        return self.max(values) == -self.max(-values)

    def std(self, values: Tensor, ddof: int) -> Tensor:
        """Standard deviation per group, exactly 0 if all its values are equal. [N] -> [G]."""
        squares = self.sum((values - self.mean(values)[self.index]) ** 2)
        std = (squares / (self.sizes - ddof).clamp(min=1)).sqrt()
        return torch.where(self.equal(values), torch.zeros_like(std), std)


def deviations(values: Tensor, groups: Groups, baseline: Tensor | None = None, singleton: Singleton = "zero") -> Tensor:
    """values - group baseline (the mean by default); exactly 0 if all values of a group are equal. [N] -> [N].

    `singleton`: result for a group of one: zero, or its raw value.
    """
    if baseline is None:
        baseline = groups.mean(values)
    centered = torch.where(
        groups.equal(values)[groups.index], torch.zeros_like(values), values - baseline[groups.index]
    )
    return keep_singletons(centered, values, groups, singleton)


def keep_singletons(advantages: Tensor, values: Tensor, groups: Groups, singleton: Singleton) -> Tensor:
    """Return `advantages`, with the raw value for groups of one if singleton is "raw"."""
    if singleton == "zero":
        return advantages
    return torch.where((groups.sizes == 1)[groups.index], values, advantages)


def normalize_in_groups(
    values: Tensor, groups: Groups, *, ddof: int = 1, eps: float = 1e-6, singleton: Singleton = "zero"
) -> Tensor:
    """(values - mean) / (std + eps) within each group; exactly 0 if all its values are equal. [N] -> [N]."""
    spread = groups.std(values, ddof) + eps
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return keep_singletons(deviations(values, groups) / spread[groups.index], values, groups, singleton)
