"""Statistics over groups of values, e.g. the rewards of the samples of one prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Assignment of N samples to G groups.

    Example: `Groups.from_ids(torch.tensor([7, 7, 9]))` has group_index [0, 0, 1] and sizes [2, 1].
    """

    group_index: Tensor  # [N] int64, 0 .. G-1
    sizes: Tensor  # [G] int64

    @classmethod
    def from_ids(cls, ids: Tensor) -> Groups:
        """Create one group per distinct id. ids [N], any integers."""
        _, group_index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        return cls(group_index, sizes)

    def sum(self, values: Tensor) -> Tensor:
        """Compute the sum of each group. [N] -> [G]."""
        return values.new_zeros(len(self.sizes)).index_add_(0, self.group_index, values)

    def mean(self, values: Tensor) -> Tensor:
        """Compute the mean of each group. [N] -> [G]."""
        return self.sum(values) / self.sizes

    def max(self, values: Tensor) -> Tensor:
        """Compute the maximum of each group. [N] -> [G]."""
        return values.new_zeros(len(self.sizes)).scatter_reduce_(
            0, self.group_index, values, "amax", include_self=False
        )

    def take_value_per_group(self, values: Tensor) -> Tensor:
        """Return the value that all samples of a group have in common. [N], equal within each group -> [G]."""
        common = values.new_empty(len(self.sizes))
        common[self.group_index] = values
        return common

    def is_constant(self, values: Tensor) -> Tensor:
        """Return whether all values of each group are equal; True for a group of one. [N] -> [G] bool.

        The test is max == min, because means and standard deviations have rounding errors.
        """
        return self.max(values) == -self.max(-values)

    def std(self, values: Tensor, ddof: int) -> Tensor:
        """Compute the standard deviation of each group, exactly 0 if all values in the group are equal. [N] -> [G]."""
        squares = self.sum((values - self.mean(values)[self.group_index]) ** 2)
        std = (squares / (self.sizes - ddof).clamp(min=1)).sqrt()
        return torch.where(self.is_constant(values), torch.zeros_like(std), std)


def center_in_groups(values: Tensor, groups: Groups, baseline: Tensor | None = None) -> Tensor:
    """Subtract each group's baseline [G], by default its mean; exactly 0 in groups of equal values. [N] -> [N]."""
    if baseline is None:
        baseline = groups.mean(values)
    is_constant = groups.is_constant(values)[groups.group_index]
    return torch.where(is_constant, torch.zeros_like(values), values - baseline[groups.group_index])


def has_variance(metric_values: Sequence[float], tolerance: float = 0.0) -> bool:
    """Return whether the samples of one group differ in the metric by more than `tolerance`.

    DAPO's dynamic sampling keeps only such groups (arXiv 2503.14476, Eq. 11). Use the accuracy as the metric, not the
    shaped reward: a length penalty makes the samples of every group differ. False for fewer than two samples. Raises
    ValueError if a value is NaN.
    """
    if any(math.isnan(value) for value in metric_values):
        raise ValueError(f"A group contains NaN metric values: {list(metric_values)}. Remove failed samples first.")
    return len(metric_values) > 1 and max(metric_values) - min(metric_values) > tolerance
