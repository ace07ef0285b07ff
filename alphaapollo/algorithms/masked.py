"""Statistics, recursions and log-ratios over the action tokens of `[B, L]` matrices, ignoring other tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this value before exp (a ratio of 4.9e8), so that float32 stays finite."""


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Replace values off the mask by exact zeros, in value and gradient, even NaN. Equal shapes."""
    return torch.where(mask.bool(), values, values.new_zeros(()))


def log_ratio(logp: Tensor, base_logp: Tensor, mask: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """Compute logp - base_logp, clamped to +-limit (gradient 0 beyond); 0 off the mask. [B, L] -> [B, L]."""
    return clamp_symmetric(apply_mask(logp - base_logp, mask), limit)


def clamp_symmetric(values: Tensor, limit: float | None) -> Tensor:
    """Clamp values to +-limit, or return them unchanged if limit is None. Any shape."""
    return values if limit is None else values.clamp(-limit, limit)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean over all action tokens; 0 without action tokens. [B, L] -> scalar."""
    return apply_mask(values, mask).sum() / mask.bool().sum().clamp(min=1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean over the action tokens of each row; 0 for an empty row. [B, L] -> [B]."""
    return apply_mask(values, mask).sum(dim=1) / mask.bool().sum(dim=1).clamp(min=1)


def standardize(values: Tensor, ddof: int, eps: float, eps_inside: bool = True) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) of a vector; exactly 0 if all values are equal. [N] -> [N].

    With eps_inside=False the denominator is std + eps.

    A mean within rounding error is treated as 0, so exact zeros of centered values remain exact.
    """
    if values.numel() < 2 or values.max() == values.min():
        return torch.zeros_like(values)
    mean, rounding = values.mean(), values.numel() * torch.finfo(values.dtype).eps * values.abs().max()
    centered = values - torch.where(mean.abs() <= rounding, torch.zeros_like(mean), mean)
    var = (centered**2).sum() / (values.numel() - ddof)
    return centered / ((var + eps).sqrt() if eps_inside else var.sqrt() + eps)


def whiten(values: Tensor, mask: Tensor, ddof: int = 1, eps: float = 1e-8, eps_inside: bool = True) -> Tensor:
    """Standardize the values over all action tokens; zero off the mask. [B, L] -> [B, L]."""
    is_action = mask.bool()
    whitened = torch.zeros_like(values)
    whitened[is_action] = standardize(values[is_action], ddof, eps, eps_inside)
    return whitened


def reward_to_go(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute G_k = R_k + gamma G_{k+1} over action tokens k only; zero off the mask. [B, L] -> [B, L]."""
    is_action = mask.bool()
    rewards = apply_mask(token_rewards, mask)
    running = rewards.new_zeros(rewards.shape[0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(is_action[:, t], rewards[:, t] + gamma * running, running)
        columns.append(running)
    return apply_mask(torch.stack(columns[::-1], dim=1), mask)


def last_action_index(mask: Tensor) -> Tensor:
    """Return the index of the last action token of each row; -1 for an empty row. [B, L] -> [B] int64."""
    from_the_end = mask.numpy()[:, ::-1] != 0  # numpy stops at the first True
    return torch.from_numpy(np.where(from_the_end.any(axis=1), mask.shape[1] - 1 - from_the_end.argmax(axis=1), -1))


def move_rewards_to_actions(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Move each reward on a non-action token (e.g. an observation) to the last action token before it.

    [B, L] -> [B, L]. If no action token precedes the reward, it moves to the first action token of the row. In a row
    without action tokens it is dropped. The mask drops rewards on non-action tokens, so without this a solved episode
    could have a return of 0.
    """
    is_action = mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    before = torch.where(is_action, positions, -1).cummax(dim=1).values
    first = is_action.to(torch.int64).argmax(dim=1, keepdim=True).expand_as(mask)
    folded = torch.zeros_like(token_rewards).scatter_add_(1, torch.where(before >= 0, before, first), token_rewards)
    return apply_mask(folded, mask)
