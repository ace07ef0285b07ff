"""Statistics of groups: the samples of one prompt, or the rows of one trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Group membership of N samples.

    Example: `Groups.from_ids(torch.tensor([7, 7, 9]))` has index [0, 0, 1] and sizes [2, 1].
    """

    index: Tensor  # [N] int64, 0 .. G-1
    sizes: Tensor  # [G] int64

    @classmethod
    def from_ids(cls, ids: Tensor) -> Groups:
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

    def first(self, values: Tensor) -> Tensor:
        """Take one value per group; equal in the group. [N] -> [G]."""
        first = values.new_empty(len(self.sizes))
        first[self.index] = values
        return first

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


def center_in_groups(values: Tensor, groups: Groups, baseline: Tensor | None = None) -> Tensor:
    """values - group baseline (the mean by default); exactly 0 if all values of a group are equal. [N] -> [N]."""
    if baseline is None:
        baseline = groups.mean(values)
    equal = groups.equal(values)[groups.index]
    return torch.where(equal, torch.zeros_like(values), values - baseline[groups.index])


def normalize_in_groups(values: Tensor, groups: Groups, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """(values - mean) / (std + eps) within each group; exactly 0 if all its values are equal. [N] -> [N]."""
    spread = groups.std(values, ddof) + eps
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return center_in_groups(values, groups) / spread[groups.index]


def has_variance(metric_values: Sequence[float], tolerance: float = 0.0) -> bool:
    """Whether the samples of a group differ in the metric: DAPO's dynamic sampling (arXiv 2503.14476, Eq. 11:
    0 < number correct < G).

    Use the accuracy, not the shaped reward: with a length penalty, samples of every group differ. The test is
    max - min, because the standard deviation of equal floats may not be 0. Groups with fewer than two samples are
    dropped.
    """
    if any(math.isnan(value) for value in metric_values):
        raise ValueError(f"NaN among the metric values of a group: {list(metric_values)}. Drop failed samples first.")
    return len(metric_values) > 1 and max(metric_values) - min(metric_values) > tolerance
