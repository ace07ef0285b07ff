"""Statistics of groups: the samples of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Singleton = Literal["zero", "raw"]


@dataclass(frozen=True)
class Groups:
    """Which group each of N samples belongs to.

    Example: `Groups.of(torch.tensor([7, 7, 9]))` has index [0, 0, 1] and sizes [2, 1].
    """

    index: Tensor  # [N] int64, 0 .. G-1
    sizes: Tensor  # [G] int64

    @classmethod
    def of(cls, ids: Tensor) -> Groups:
        _, index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    def sum(self, values: Tensor) -> Tensor:
        """[N] -> [G]."""
        return values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """[N] -> [G]."""
        return self.sum(values) / self.sizes

    def max(self, values: Tensor) -> Tensor:
        """[N] -> [G]."""
        return values.new_zeros(len(self.sizes)).scatter_reduce_(0, self.index, values, "amax", include_self=False)

    def equal(self, values: Tensor) -> Tensor:
        """Groups whose values are all the same, a group of one included. [N] -> [G] bool.

        Compared as max == min: a mean and a standard deviation in floating point let rounding leak.
        """
        return self.max(values) == -self.max(-values)

    def std(self, values: Tensor, ddof: int) -> Tensor:
        """Standard deviation, 0 for equal groups. [N] -> [G]."""
        squares = self.sum((values - self.mean(values)[self.index]) ** 2)
        std = (squares / (self.sizes - ddof).clamp(min=1)).sqrt()
        return torch.where(self.equal(values), torch.zeros_like(std), std)


def deviations(values: Tensor, groups: Groups, baseline: Tensor | None = None, singleton: Singleton = "zero") -> Tensor:
    """values - baseline of the group (its mean by default); exactly 0 where a group is all-equal. [N] -> [N].

    `singleton`: what a group of one gets, which has nothing to be compared with: zero, or its raw value.
    """
    if baseline is None:
        baseline = groups.mean(values)
    away = torch.where(groups.equal(values)[groups.index], torch.zeros_like(values), values - baseline[groups.index])
    return keep_singletons(away, values, groups, singleton)


def keep_singletons(advantages: Tensor, values: Tensor, groups: Groups, singleton: Singleton) -> Tensor:
    """Give groups of one their raw value where `singleton` says so."""
    if singleton == "zero":
        return advantages
    return torch.where((groups.sizes == 1)[groups.index], values, advantages)


def normalize_in_groups(
    values: Tensor, groups: Groups, *, ddof: int = 1, eps: float = 1e-6, singleton: Singleton = "zero"
) -> Tensor:
    """(values - mean) / (std + eps) within each group; exactly 0 where a group is all-equal. [N] -> [N]."""
    spread = groups.std(values, ddof) + eps
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return keep_singletons(deviations(values, groups) / spread[groups.index], values, groups, singleton)
