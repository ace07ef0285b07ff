"""Statistics, recursions and log-ratios over the action tokens of `[B, L]` matrices. Values off the mask are
ignored."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this value before exp (a ratio of 4.9e8), so that float32 stays finite."""


def apply_mask(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with exact zeros off the mask, in value and gradient, even for NaN."""
    return torch.where(mask.bool(), values, values.new_zeros(()))


def log_ratio(logp: Tensor, base_logp: Tensor, mask: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """logp - base_logp on action tokens, clamped to +-limit (gradient 0 beyond); 0 off the mask. [B, L] -> [B, L]."""
    return clamp_symmetric(apply_mask(logp - base_logp, mask), limit)


def clamp_symmetric(values: Tensor, limit: float | None) -> Tensor:
    """Clamp to +-limit; None: unchanged."""
    return values if limit is None else values.clamp(-limit, limit)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over all action tokens, a scalar; 0 if there are none."""
    return apply_mask(values, mask).sum() / mask.bool().sum().clamp(min=1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's action tokens; 0 for an empty row. [B, L] -> [B]."""
    return apply_mask(values, mask).sum(dim=1) / mask.bool().sum(dim=1).clamp(min=1)


def standardize(values: Tensor, ddof: int, eps: float, eps_inside: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + eps) of a vector; exactly 0 if all are equal. `eps_inside=False`: / (std + eps).

    A mean within rounding error is treated as 0, so values that are already centered keep exact zeros.
    """
    if values.numel() < 2 or values.max() == values.min():
        return torch.zeros_like(values)
    mean, rounding = values.mean(), values.numel() * torch.finfo(values.dtype).eps * values.abs().max()
    centered = values - torch.where(mean.abs() <= rounding, torch.zeros_like(mean), mean)
    var = (centered**2).sum() / (values.numel() - ddof)
    return centered / ((var + eps).sqrt() if eps_inside else var.sqrt() + eps)


def whiten(values: Tensor, mask: Tensor, ddof: int = 1, eps: float = 1e-8, eps_inside: bool = True) -> Tensor:
    """Standardize over all action tokens, zero off the mask. [B, L] -> [B, L]."""
    is_action = mask.bool()
    whitened = torch.zeros_like(values)
    whitened[is_action] = standardize(values[is_action], ddof, eps, eps_inside)
    return whitened


def reward_to_go(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """G_k = R_k + gamma G_{k+1}, with k running over action tokens only; zero off the mask. [B, L] -> [B, L]."""
    is_action = mask.bool()
    rewards = apply_mask(token_rewards, mask)
    running = rewards.new_zeros(rewards.shape[0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(is_action[:, t], rewards[:, t] + gamma * running, running)
        columns.append(running)
    return apply_mask(torch.stack(columns[::-1], dim=1), mask)


def last_action_index(mask: Tensor) -> Tensor:
    """Position of each row's last action token; -1 for an empty row. [B, L] -> [B] int64."""
    from_the_end = mask.numpy()[:, ::-1] != 0  # numpy stops at the first
    return torch.from_numpy(np.where(from_the_end.any(axis=1), mask.shape[1] - 1 - from_the_end.argmax(axis=1), -1))


def move_rewards_to_actions(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Move rewards off the mask (on an observation token) to the last action token before them, or to the first
    action token of the row if there is none; dropped for an empty row. [B, L] -> [B, L].

    Without this the mask would drop such rewards, and a solved episode would have a return of 0.
    """
    is_action = mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    before = torch.where(is_action, positions, -1).cummax(dim=1).values
    first = is_action.to(torch.int64).argmax(dim=1, keepdim=True).expand_as(mask)
    folded = torch.zeros_like(token_rewards).scatter_add_(1, torch.where(before >= 0, before, first), token_rewards)
    return apply_mask(folded, mask)
