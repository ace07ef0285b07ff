"""Importance weights for the log-prob mismatch of rollout engine and trainer: rho = pi_old / pi_rollout.

The weights are constants (no gradient) and multiply the policy term only, not KL or entropy. In bypass mode the old
log-probs come from the engine, so PPO's ratio already corrects the mismatch. Do not apply both.

    truncated, token       min(rho, high) per token: TIS
    masked, token          rho [low <= rho <= high]: IcePop (arXiv 2510.18855), bounds (0.5, 5)
    masked, sequence       product of rho over the row, 0 outside the bounds: MIS
    masked, geometric      geometric mean of rho over the row, 0 outside the bounds
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import MAX_LOG_RATIO, apply_mask, clamp_symmetric, log_ratio, row_mean
from alphaapollo.config.schema import RolloutCorrection

Level = Literal["token", "sequence", "geometric"]
Method = Literal["tis", "mask"]


def mismatch_weights(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    method: Method = "tis",
    level: Level = "token",
    low: float | None = None,
    high: float | None = 2.0,
    limit: float | None = MAX_LOG_RATIO,
) -> Tensor:
    """Compute importance weights on action tokens, zero off the mask. [B, L] each -> [B, L].

    Method tis truncates rho to [low, high]; method mask sets rho outside [low, high] to 0.
    """
    rho = importance_ratio(train_logp.detach(), rollout_logp.detach(), mask, level, limit)
    if method == "tis":
        weights = rho.clamp(min=low, max=high) if (low is not None or high is not None) else rho
    else:
        inside = torch.ones_like(rho, dtype=torch.bool)
        if low is not None:
            inside &= rho >= low
        if high is not None:
            inside &= rho <= high
        weights = apply_mask(rho, inside)
    return apply_mask(weights, mask)


def importance_ratio(
    train_logp: Tensor, rollout_logp: Tensor, mask: Tensor, level: Level, limit: float | None
) -> Tensor:
    """Compute rho per token, or per row (product or geometric mean) and copied to its tokens. [B, L] -> [B, L]."""
    d = log_ratio(train_logp, rollout_logp, mask, limit=None)
    if level == "sequence":
        d = d.sum(dim=1, keepdim=True).expand_as(d)
    elif level == "geometric":
        d = row_mean(d, mask).unsqueeze(1).expand_as(d)
    return clamp_symmetric(d, limit).exp()


def needs_full_sequences(correction: RolloutCorrection) -> bool:
    """Whether weights depend on complete sequences, so that the rows of a trajectory must share a micro-batch."""
    return correction.method is not None and correction.level != "token"
