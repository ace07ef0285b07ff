"""KL divergence to a reference policy: estimators, penalty in the reward, and update of the coefficient.

Estimators use log-probs of sampled tokens; expectations are over samples of the policy (d = log pi - log ref):

    kind                value             E[value]      E[gradient]
    k1 = kl             d                 KL(pi||ref)   0
    abs                 |d|
    k2 = mse            d^2 / 2                         grad KL(pi||ref)
    k3 = low_var_kl     e^-d + d - 1      KL(pi||ref)   grad KL(ref||pi)
    X+                  X                 as X          grad KL(pi||ref): the gradient of k2

For a KL in the loss use k2 or k3+. If an older policy or another engine sampled the tokens, only unbiased_kl has the
value and the gradient of KL(pi||ref). `full` needs both distributions; models/lm_head.py computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import MAX_LOG_RATIO, apply_mask, log_ratio
from alphaapollo.config.schema import KLControl

ESTIMATORS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}
"""Estimator names in the config -> formula."""


def kl_penalty(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Estimate KL(pi||ref) at each sampled token, in nats. Any equal shapes.

    kind: key of ESTIMATORS. With a trailing +, the result has the value of that estimator and the gradient of k2. k3
    clamps the log-ratio from below at -MAX_LOG_RATIO, so that exp stays finite.
    """
    d = logp - ref_logp
    k2 = 0.5 * d**2
    match ESTIMATORS[kind.removesuffix("+")]:
        case "k1":
            value = d
        case "abs":
            value = d.abs()
        case "k2":
            value = k2
        case _:
            clamped = d.clamp(min=-MAX_LOG_RATIO)
            value = torch.expm1(-clamped) + clamped
    return k2 - k2.detach() + value.detach() if kind.endswith("+") else value


def unbiased_kl(logp: Tensor, behavior_logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(pi||ref) at each sampled token as (pi / mu) k3, in nats (arXiv 2512.02556, Eq. 7). All [B, L].

    behavior_logp: log-probs of the policy mu that sampled the tokens. The ratio pi / mu also has a gradient, so that
    expectations over tokens of mu are KL(pi||ref) and its gradient. The gradient (pi / mu) d is computed directly:
    differentiating the product subtracts terms of size e^-d.
    """
    constant = logp.detach()
    ratio = log_ratio(constant, behavior_logp, mask).exp()
    gradient = apply_mask(ratio * (constant - ref_logp), mask)
    return ratio * kl_penalty(constant, ref_logp, "k3") + gradient * (logp - constant)


@dataclass(frozen=True, slots=True)
class KLShapedRewards:
    """Token rewards after subtracting the KL penalty, and the mean KL per sequence and per token."""

    token_rewards: Tensor  # [n]
    kl_per_sequence: Tensor  # scalar: sum over tokens, mean over non-empty sequences; input of next_kl_coef
    kl_per_token: Tensor  # scalar: mean over each sequence's tokens, then over non-empty sequences


def subtract_kl(
    token_rewards: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    lengths: Tensor,
    coef: float,
    kind: str = "kl",
) -> KLShapedRewards:
    """Subtract coef * kl_penalty from the reward of each action token (arXiv 1909.08593, Eq. 2).

    Tensors have one value for each of n tokens. lengths: [N] tokens of each sequence, action tokens or not; their sum
    is n.
    """
    kl = apply_mask(kl_penalty(old_logp, ref_logp, kind), mask)
    sums, actions = (torch.segment_reduce(values.to(kl.dtype), "sum", lengths=lengths) for values in (kl, mask))
    num_sequences = (actions > 0).sum().clamp(min=1)
    return KLShapedRewards(
        token_rewards=token_rewards - coef * kl,
        kl_per_sequence=sums.sum() / num_sequences,
        kl_per_token=(sums / actions.clamp(min=1)).sum() / num_sequences,
    )


def next_kl_coef(config: KLControl, coef: float, kl: float, num_sequences: int) -> float:
    """Compute the coefficient of the KL in the reward for the next iteration.

    Args:
        coef: coefficient of this iteration.
        kl: measured KL in nats *per sequence*, so target_kl=6 means 6 nats per response, not per token.
        num_sequences: number of trajectories in the iteration.
    """
    target = config.target_kl
    match config.type:
        case "fixed":
            return config.kl_coef
        case "adaptive":  # arXiv 1909.08593, section 2.2
            error = min(max(kl / target - 1.0, -0.2), 0.2)
            return coef * (1.0 + error * num_sequences / config.horizon)
        case "doubling":  # PPO's adaptive KL penalty, arXiv 1707.06347, section 4
            if kl < target / 1.5:
                return coef / 2.0
            return coef * 2.0 if kl > target * 1.5 else coef
        case "dual":
            return next_kl_coef_by_dual_ascent(coef, kl, target)


def next_kl_coef_by_dual_ascent(coef: float, kl: float, target: float, step_size: float = 0.01) -> float:
    """Update the KL coefficient as the Lagrange multiplier of kl <= target: max(0, coef + step_size (kl - target)).

    step_size: change of the coefficient per nat. A negative coefficient would reward divergence.
    """
    return max(0.0, coef + step_size * (kl - target))
