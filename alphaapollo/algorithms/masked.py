"""Means, whitening, log-ratios and rewards-to-go of `[B, L]` matrices, over the tokens where a 0/1 mask is 1."""

from __future__ import annotations

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
    # NumPy, and one contiguous row per position: each step takes microseconds, and L can be large.
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
    following = torch.nn.functional.pad(positions.flip(1).cummin(dim=1).values.flip(1)[:, 1:], (0, 1), value=length)
    return torch.nn.functional.pad(values, (0, 1)).gather(1, following)


def move_rewards_to_actions(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Move each reward outside the action mask (e.g. on an observation) to the last action token before it.

    [B, L] each -> [B, L]. A reward before the first action token of its row moves to that token. In a row without
    action tokens the rewards are dropped. Estimators ignore rewards outside the mask, so without this function a solved
    episode could have a return of 0.
    """
    is_action = mask.bool()
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    before = torch.where(is_action, positions, -1).cummax(dim=1).values
    first = is_action.to(torch.int64).argmax(dim=1, keepdim=True).expand_as(mask)
    folded = torch.zeros_like(token_rewards).scatter_add_(1, torch.where(before >= 0, before, first), token_rewards)
    return apply_mask(folded, mask)
