"""DPPO: drop tokens whose probability moved too far from the rollout engine's, instead of clipping the ratio."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import log_ratio
from alphaapollo.algorithms.policy_losses.base import (
    CLIP,
    PolicyLossInputs,
    PolicyLossOutput,
    clip_range,
    compute_clip_metrics,
    register_policy_loss,
)
from alphaapollo.config.schema import Actor


def binary_tv(logp: Tensor, rollout_logp: Tensor) -> Tensor:
    """Compute |mu - pi|, the total variation between "this token" and "any other" (arXiv 2602.04879, Eq. 13).

    pi: trained policy, mu: rollout engine. Any equal shapes.
    """
    return (logp.exp() - rollout_logp.exp()).abs()


def binary_kl(logp: Tensor, rollout_logp: Tensor) -> Tensor:
    """Compute KL(mu||pi) between "this token" and "any other", in nats (arXiv 2602.04879, Eq. 14). Any equal shapes.

    Infinite if pi = 1 > mu.
    """
    rest, rollout_rest = (-torch.expm1(each.clamp(max=0.0)) for each in (logp, rollout_logp))
    others = torch.xlogy(rollout_rest, rollout_rest) - torch.xlogy(rollout_rest, rest)
    return rollout_logp.exp() * (rollout_logp - logp) + others


def is_dropped(log_ratio: Tensor, divergence: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where DPPO drops a token (arXiv 2602.04879, Eq. 12). Any equal shapes -> bool.

    A token is dropped if the update moves it away from the engine's policy (A > 0 and ratio > 1, or A < 0 and
    ratio < 1), and its divergence exceeds `high` or `low`, respectively.
    """
    too_high = (advantages > 0) & (log_ratio > 0) & (divergence > high)
    return too_high | ((advantages < 0) & (log_ratio < 0) & (divergence > low))


def dppo(logp: Tensor, log_ratio: Tensor, advantages: Tensor, dropped: Tensor, cap: float = math.inf) -> Tensor:
    """Compute the DPPO loss -sg[min(r, cap)] A, with gradient through log pi; 0 where dropped. All [B, L].

    arXiv 2602.04879, Eq. 12, and Eq. 23 for the cap. Without a cap, value and gradient are those of -r A.
    """
    weight = log_ratio.detach().exp().clamp(max=cap)
    loss = -weight * advantages * (1.0 + logp - logp.detach())
    return torch.where(dropped, torch.zeros_like(loss), loss)


def _dppo(
    inputs: PolicyLossInputs, config: Actor, divergence: Callable[..., Tensor], default: float
) -> PolicyLossOutput:
    """Compute the DPPO loss. inputs.old_logp are the engine's log-probs, because the losses have anchor="rollout"."""
    logp, rollout_logp, advantages = inputs.logp.detach(), inputs.old_logp, inputs.advantages
    d = log_ratio(logp, rollout_logp, inputs.mask)
    dropped = is_dropped(d, divergence(logp, rollout_logp), advantages, *clip_range(config, default, default))
    loss = dppo(inputs.logp, d, advantages, dropped, config.clip_ratio_c or math.inf)
    return PolicyLossOutput(loss, compute_clip_metrics(dropped, d > 0, inputs.mask))


@register_policy_loss("dppo_tv", zero_without_advantage=True, anchor="rollout", reads=(*CLIP, "clip_ratio_c"))
def _dppo_tv(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the DPPO loss with bounds of binary_tv, by default 0.2 (section 5 of the paper)."""
    return _dppo(inputs, config, binary_tv, 0.2)


@register_policy_loss("dppo_kl", zero_without_advantage=True, anchor="rollout", reads=(*CLIP, "clip_ratio_c"))
def _dppo_kl(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the DPPO loss with bounds of binary_kl, by default 0.05 (section 5 of the paper)."""
    return _dppo(inputs, config, binary_kl, 0.05)
