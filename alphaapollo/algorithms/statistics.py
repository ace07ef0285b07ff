"""Statistics over the tokens of `[B, L]` matrices where a 0/1 mask is 1, over groups of values, e.g. the rewards of the
samples of one prompt, and over trajectories that have several rows.

If the environment starts a new prompt each turn (memory context), a trajectory has one row per turn. Rewards-to-go and
sequence-level ratios cover the whole trajectory, so they are computed on one row per trajectory:

    rows [B, L] --join--> trajectories [N, K] --recursion or mean over tokens--> [N, K] --split--> rows [B, L]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this value before exp (a ratio of 4.9e8), so that float32 stays finite."""


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Set values outside the mask to 0, even NaN and infinity, so that their gradient is 0. Any equal shapes."""
    return torch.where(mask.bool(), values, values.new_zeros(()))


def log_ratio(logp: Tensor, base_logp: Tensor, mask: Tensor) -> Tensor:
    """Compute logp - base_logp, clamped as in clamp_log_ratio; 0 outside the mask. [B, L] each -> [B, L]."""
    return clamp_log_ratio(apply_mask(logp - base_logp, mask))


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp to +-MAX_LOG_RATIO, with gradient 0 beyond. Any shape."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean over all tokens in the mask; 0 if there are none. Any equal shapes -> scalar."""
    return apply_mask(values, mask).sum() / mask.bool().sum().clamp(min=1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of each row over its tokens in the mask; 0 if there are none. [B, L] each -> [B]."""
    return apply_mask(values, mask).sum(dim=1) / mask.bool().sum(dim=1).clamp(min=1)


def standardize(values: Tensor, ddof: int, eps: float, eps_in_sqrt: bool = True) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) of a vector; exactly 0 if all values are equal. [N] -> [N].

    With eps_in_sqrt=False the denominator is std + eps. A mean that is only rounding error is not subtracted, so that
    exact zeros among values that are already centered remain exact.
    """
    if values.numel() < 2 or values.max() == values.min():
        return torch.zeros_like(values)
    mean, rounding = values.mean(), values.numel() * torch.finfo(values.dtype).eps * values.abs().max()
    centered = values - torch.where(mean.abs() <= rounding, torch.zeros_like(mean), mean)
    var = (centered**2).sum() / (values.numel() - ddof)
    return centered / ((var + eps).sqrt() if eps_in_sqrt else var.sqrt() + eps)


def whiten(values: Tensor, mask: Tensor, ddof: int = 1, eps: float = 1e-8, eps_in_sqrt: bool = True) -> Tensor:
    """Standardize the values over all tokens in the mask; 0 outside the mask. [B, L] each -> [B, L]."""
    is_action = mask.bool()
    whitened = torch.zeros_like(values)
    whitened[is_action] = standardize(values[is_action], ddof, eps, eps_in_sqrt)
    return whitened


def reward_to_go(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute the reward-to-go G_k = R_k + gamma G_{k+1} over a row's action tokens k (mask 1), else 0. [B, L] each."""
    # NumPy with one contiguous row per position, so that each of the L steps takes microseconds.
    is_action, sums = mask.bool().T.contiguous().numpy(), apply_mask(token_rewards, mask).T.clone().numpy()
    running = np.zeros_like(sums[0])
    for t in reversed(range(len(sums))):
        np.add(sums[t], gamma * running, out=running, where=is_action[t])
        sums[t] = running
    return apply_mask(torch.from_numpy(sums).T.contiguous(), mask)


def next_action_value(values: Tensor, mask: Tensor) -> Tensor:
    """Return the value of the next action token (mask 1) of each row; 0 if there is none. [B, L] each -> [B, L]."""
    length = mask.shape[1]
    positions = torch.where(mask.bool(), torch.arange(length, device=mask.device), length)
    next_positions = positions.flip(1).cummin(dim=1).values.flip(1)[:, 1:]  # `length`, if no action token follows
    next_positions = torch.nn.functional.pad(next_positions, (0, 1), value=length)
    return torch.nn.functional.pad(values, (0, 1)).gather(1, next_positions)


def move_rewards_to_actions(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Move each reward outside the action mask (e.g. on an observation) to the last action token before it.

    [B, L] each -> [B, L]. A reward before the first action token of its row moves to that token. In a row without
    action tokens the rewards are dropped. Estimators ignore rewards outside the mask, so without this function a solved
    episode could have a return of 0.
    """
    is_action = mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last_action = torch.where(is_action, positions, -1).cummax(dim=1).values  # -1 before the first action token
    first_action = is_action.to(torch.int64).argmax(dim=1, keepdim=True).expand_as(mask)
    target = torch.where(last_action >= 0, last_action, first_action)
    return apply_mask(torch.zeros_like(token_rewards).scatter_add_(1, target, token_rewards), mask)


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
        maxima = values.new_zeros(len(self.sizes))
        return maxima.scatter_reduce_(0, self.group_index, values, "amax", include_self=False)

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

        times: int64 [B, L], by which a trajectory's action tokens are sorted; tokens of equal times keep their order.
        """
        rows = Groups.from_ids(trajectory_ids)
        if torch.equal(rows.group_index, torch.arange(len(mask), device=mask.device)):
            return cls(mask, rows, mask, None)
        row, column = mask.bool().nonzero(as_tuple=True)
        if times is not None:
            by_time = times[row, column].argsort(stable=True)
            row, column = row[by_time], column[by_time]
        order = rows.group_index[row].argsort(stable=True)
        trajectory = rows.group_index[row[order]]
        counts = torch.bincount(trajectory, minlength=1)
        position = torch.arange(len(trajectory), device=mask.device) - (counts.cumsum(0) - counts)[trajectory]
        joined_mask = mask.new_zeros(len(rows.sizes), int(position.max()) + 1 if len(position) else 1)
        joined_mask[trajectory, position] = 1
        return cls(joined_mask, rows, mask, ((row[order], column[order]), (trajectory, position)))

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
