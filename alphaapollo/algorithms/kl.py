"""KL divergence to a reference policy: estimators, penalty in the reward, and update of the coefficient.

Estimators use log-probs of sampled tokens; expectations are over samples of the policy (d = log pi - log ref):

    kind                value             E[value]      E[gradient]
    k1 = kl             d                 KL(pi||ref)   0
    abs                 |d|
    k2 = mse            d^2 / 2                         grad KL(pi||ref)
    k3 = low_var_kl     e^-d + d - 1      KL(pi||ref)   grad KL(ref||pi)
    X+                  X                 as X          grad KL(pi||ref): the gradient of k2

For a KL in the loss use k2 or k3+. `full` needs both distributions; models/lm_head.py computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import MAX_LOG_RATIO, apply_mask
from alphaapollo.config.schema import KLControl

ESTIMATORS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
"""Estimator names in the config -> formula."""


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """Estimate KL(pi||ref) at each sampled token, in nats. [B, L] each -> [B, L], unmasked.

    Args:
        kind: key of ESTIMATORS; with a trailing +, the value of that estimator has the gradient of k2.
        limit: clamp of k3, see estimate_kl.
    """
    log_ratio = logp - ref_logp
    value = estimate_kl(log_ratio, kind.removesuffix("+"), limit)
    if not kind.endswith("+"):
        return value
    k2 = 0.5 * log_ratio**2
    return k2 - k2.detach() + value.detach()


@dataclass(frozen=True, slots=True)
class KLShapedRewards:
    """Token rewards after subtracting the KL penalty, and the mean KL per sequence and per token."""

    token_rewards: Tensor  # [B, L]
    kl: Tensor  # [B, L], zero off the mask
    per_sequence: Tensor  # scalar: sum over tokens, mean over non-empty rows; input of next_kl_coef
    per_token: Tensor  # scalar: mean over each row's tokens, then over non-empty rows


def subtract_kl(
    token_rewards: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    coef: float,
    kind: str = "kl",
    limit: float | None = MAX_LOG_RATIO,
) -> KLShapedRewards:
    """Compute R_t = r_t - coef KL_t on action tokens (arXiv 1909.08593, Eq. 2; arXiv 2203.02155). [B, L] each."""
    kl = apply_mask(kl_penalty(old_logp, ref_logp, kind, limit), mask)
    lengths = mask.sum(dim=1)
    num_rows = (lengths > 0).sum().clamp(min=1)
    sums = kl.sum(dim=1)
    return KLShapedRewards(
        token_rewards=token_rewards - coef * kl,
        kl=kl,
        per_sequence=sums.sum() / num_rows,
        per_token=(sums / lengths.clamp(min=1)).sum() / num_rows,
    )


def estimate_kl(log_ratio: Tensor, name: str, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """Compute the estimator `name` (a key of ESTIMATORS), with its own gradient. Any shape.

    limit: k3 clamps d to at least -limit, because exp would overflow.
    """
    match ESTIMATORS[name]:
        case "k1":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "k2":
            return 0.5 * log_ratio**2
        case _:
            clamped = log_ratio if limit is None else log_ratio.clamp(min=-limit)
            return torch.expm1(-clamped) + clamped


def next_kl_coef(config: KLControl, coef: float, kl: float, num_sequences: int) -> float:
    """Compute the coefficient of the KL in the reward for the next iteration (saved in trainer/progress.py).

    kl: *sum per sequence* in nats, averaged over sequences. A target of 6 means 6 nats per response, not per token.
    """
    match config.type:
        case "fixed":
            return config.kl_coef
        case "adaptive":
            return adaptive_kl_coef(coef, kl, num_sequences, config.target_kl, config.horizon)
        case "doubling":
            return doubling_kl_coef(coef, kl, config.target_kl)
        case "dual":
            return dual_kl_coef(coef, kl, config.target_kl)


def adaptive_kl_coef(coef: float, kl: float, num_sequences: int, target: float, horizon: float) -> float:
    """Apply proportional control in log space (arXiv 1909.08593, section 2.2).

    coef <- coef (1 + e n / horizon) with e = clip(KL / target - 1, -0.2, 0.2).
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * num_sequences / horizon)


def doubling_kl_coef(coef: float, kl: float, target: float) -> float:
    """Halve the coefficient if KL < target / 1.5, double it if KL > 1.5 target (PPO, arXiv 1707.06347, section 4)."""
    if kl < target / 1.5:
        return coef / 2.0
    return coef * 2.0 if kl > target * 1.5 else coef


def dual_kl_coef(coef: float, kl: float, target: float, step_size: float = 0.01) -> float:
    """Apply dual ascent to the multiplier of KL <= target: coef <- max(0, coef + step_size (KL - target)).

    step_size is per nat. Without the projection to 0, a negative multiplier would reward divergence.
    """
    return max(0.0, coef + step_size * (kl - target))
