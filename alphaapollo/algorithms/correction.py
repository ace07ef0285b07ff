"""Importance weights rho = pi_old / pi_rollout, which correct the log-prob mismatch of rollout engine and trainer.

The weights are constants (no gradient) and multiply the policy term of the loss only, not KL or entropy. With
rollout_correction.bypass the old log-probs come from the engine, so PPO's ratio already corrects the mismatch.

    method=tis, level=token        min(rho, high) of each token: truncated importance sampling
    method=mask, level=token       rho of each token, 0 outside [low, high]: IcePop (arXiv 2510.18855) with [0.5, 5]
    method=mask, level=sequence    product of rho over the row, 0 outside [low, high]: masked importance sampling
    method=mask, level=geometric   geometric mean of rho over the row, 0 outside [low, high]

off_policy_sequence_mask drops the policy term of negative samples from which the trained policy has moved away.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from alphaapollo.algorithms.masked import apply_mask, clamp_log_ratio, row_mean
from alphaapollo.config.schema import RolloutCorrection

Level = Literal["token", "sequence", "geometric"]
Method = Literal["tis", "mask"]


def rollout_correction_weights(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    method: Method = "tis",
    level: Level = "token",
    low: float | None = None,
    high: float | None = 2.0,
) -> Tensor:
    """Compute the importance weights rho of action tokens; 0 outside the mask. [B, L] each -> [B, L].

    Args:
        method: tis truncates rho to [low, high]; mask sets rho outside [low, high] to 0.
        level: rho is a token's ratio (token), or its row's product (sequence) or geometric mean (geometric) of ratios.
    """
    d = apply_mask(train_logp.detach() - rollout_logp.detach(), mask)
    if level == "sequence":
        d = d.sum(dim=1, keepdim=True).expand_as(d)
    elif level == "geometric":
        d = row_mean(d, mask).unsqueeze(1).expand_as(d)
    rho = clamp_log_ratio(d).exp()
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    weights = rho.clamp(low, high) if method == "tis" else apply_mask(rho, (rho >= low) & (rho <= high))
    return apply_mask(weights, mask)


def off_policy_sequence_mask(
    logp: Tensor, rollout_logp: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return 1 on tokens to train on, 0 on dropped tokens and outside the mask (arXiv 2512.02556, Eq. 9). [B, L] each.

    A token is dropped if its advantage is negative, and the mean of log(mu/pi) over the row's tokens exceeds the
    threshold, in nats. pi: trained policy. mu: rollout engine.
    """
    divergence = row_mean(rollout_logp - logp.detach(), mask)
    dropped = (advantages < 0) & (divergence > threshold).unsqueeze(1)
    return apply_mask((~dropped).to(logp.dtype), mask)


def needs_full_sequence(correction: RolloutCorrection) -> bool:
    """Return whether a token's weight depends on its whole trajectory, which must then be in one micro-batch."""
    has_sequence_weight = correction.method is not None and correction.level != "token"
    return has_sequence_weight or correction.off_policy_mask_threshold is not None
