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
        """Group samples with equal ids. ids [N], any integers."""
        _, index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    def sum(self, values: Tensor) -> Tensor:
        """Compute the sum of each group. [N] -> [G]."""
        return values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Compute the mean of each group. [N] -> [G]."""
        return self.sum(values) / self.sizes

    def max(self, values: Tensor) -> Tensor:
        """Compute the maximum of each group. [N] -> [G]."""
        return values.new_zeros(len(self.sizes)).scatter_reduce_(0, self.index, values, "amax", include_self=False)

    def first(self, values: Tensor) -> Tensor:
        """Return one value of each group, for values that are equal within a group. [N] -> [G]."""
        first = values.new_empty(len(self.sizes))
        first[self.index] = values
        return first

    def is_constant(self, values: Tensor) -> Tensor:
        """Return whether all values of each group are equal; True for a group of one. [N] -> [G] bool.

        The test is max == min, because means and standard deviations have rounding errors.
        """
        return self.max(values) == -self.max(-values)

    def std(self, values: Tensor, ddof: int) -> Tensor:
        """Compute the standard deviation of each group, exactly 0 if all values in the group are equal. [N] -> [G]."""
        squares = self.sum((values - self.mean(values)[self.index]) ** 2)
        std = (squares / (self.sizes - ddof).clamp(min=1)).sqrt()
        return torch.where(self.is_constant(values), torch.zeros_like(std), std)


def center_in_groups(values: Tensor, groups: Groups, baseline: Tensor | None = None) -> Tensor:
    """Subtract the baseline of the group (by default its mean); exactly 0 if the group is constant. [N] -> [N].

    baseline: [G].
    """
    if baseline is None:
        baseline = groups.mean(values)
    is_constant = groups.is_constant(values)[groups.index]
    return torch.where(is_constant, torch.zeros_like(values), values - baseline[groups.index])


def normalize_in_groups(values: Tensor, groups: Groups, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Compute (values - mean) / (std + eps) within each group; exactly 0 if the group is constant. [N] -> [N]."""
    spread = groups.std(values, ddof) + eps
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return center_in_groups(values, groups) / spread[groups.index]


def has_variance(metric_values: Sequence[float], tolerance: float = 0.0) -> bool:
    """Return whether the samples of one group differ in the metric by more than `tolerance`.

    DAPO's dynamic sampling drops the other groups (arXiv 2503.14476, Eq. 11: 0 < number correct < G). Use the accuracy
    as the metric, not the shaped reward: a length penalty makes the samples of every group differ. The test is
    max - min, because the standard deviation of equal floats may not be 0. False for fewer than two samples.

    Raises ValueError if a value is NaN.
    """
    if any(math.isnan(value) for value in metric_values):
        raise ValueError(f"The metric values of a group contain NaN: {list(metric_values)}. Drop failed samples first.")
    return len(metric_values) > 1 and max(metric_values) - min(metric_values) > tolerance
