"""Losses with the importance ratio of each token.

ppo         clipped surrogate, with asymmetric bounds (DAPO's clip-higher) and the dual clip
cispo       clips the importance weight instead of the gradient
sapo        a soft gate instead of the hard clip
reinforce   plain policy gradient, without a ratio
"""

from __future__ import annotations

import math

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
    token_sum,
)
from alphaapollo.config.schema import Actor


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> Tensor:
    """Compute PPO's loss -min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, Eq. 7). Any equal shapes.

    With dual_clip c > 1, the loss is at most -c A where A < 0 (arXiv 1912.09729, Eq. 5).
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def is_clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where PPO clips: ratio > 1 + high and A > 0, or ratio < 1 - low and A < 0. Any equal shapes -> bool."""
    return ((advantages > 0) & (ratio > 1.0 + high)) | ((advantages < 0) & (ratio < 1.0 - low))


@register_policy_loss("ppo", zero_without_advantage=True, reads=(*CLIP, "clip_ratio_c"))
def _ppo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    low, high = clip_range(config, 0.2, 0.2)
    ratio = log_ratio(inputs.logp, inputs.old_logp, inputs.mask).exp()
    output = clipped_surrogate(ratio, inputs.advantages, inputs.mask, low, high, config.clip_ratio_c)
    if config.clip_ratio_c is not None:
        dual = (inputs.advantages < 0) & (ratio > config.clip_ratio_c)
        output.metrics["pg_clipfrac_lower"] = token_sum(dual, inputs.mask)
    return output


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, dual_clip: float | None = None
) -> PolicyLossOutput:
    """Compute PPO's clipped loss and the clip fractions. ratio, advantages: [B, L], or [B] per row; mask: [B, L]."""
    metrics = compute_clip_metrics(is_clipped(ratio, advantages, low, high), ratio > 1, mask)
    return PolicyLossOutput(ppo_clip(ratio, advantages, low, high, dual_clip), metrics)


def cispo(
    logp: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    mask_low: float | None,
    mask_high: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute the CISPO loss -sg[clip(r, 1 - low, 1 + high)] A log pi (arXiv 2506.13585, Eq. 4-5). All [B, L].

    low=inf means no lower bound. With mask_low and mask_high, tokens with A > 0 and r > 1 + mask_high, or A < 0 and
    r < 1 - mask_low, have loss 0 but still count in the denominator (Eq. 6-7). Returns the loss and a bool matrix that
    is True where the weight is clipped or the loss is set to 0.
    """
    ratio = ratio.detach()
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    mask_low, mask_high = (math.inf if radius is None else radius for radius in (mask_low, mask_high))
    dropped = is_clipped(ratio, advantages, mask_low, mask_high)
    loss = torch.where(dropped, torch.zeros_like(logp), -weight * advantages * logp)
    return loss, dropped | (weight != ratio)


@register_policy_loss(
    "cispo", zero_without_advantage=True, reads=(*CLIP, "policy_loss.cispo_mask_low", "policy_loss.cispo_mask_high")
)
def _cispo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the CISPO loss. By default the importance weight has no lower bound and the upper bound 1.28."""
    low, high = clip_range(config, math.inf, 0.28)
    mask_low, mask_high = config.policy_loss.cispo_mask_low, config.policy_loss.cispo_mask_high
    ratio = log_ratio(inputs.logp.detach(), inputs.old_logp, inputs.mask).exp()
    loss, clipped = cispo(inputs.logp, ratio, inputs.advantages, low, high, mask_low, mask_high)
    return PolicyLossOutput(loss, compute_clip_metrics(clipped, ratio > 1, inputs.mask))


def sapo(ratio: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """Compute the SAPO loss -(4/tau) sigmoid(tau (r - 1)) A (arXiv 2511.20347, Eq. 5-6). Any equal shapes.

    tau is tau_pos where A > 0, else tau_neg. The gradient has weight 1 at ratio r = 1 and decreases on both sides.
    """
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages


@register_policy_loss("sapo", zero_without_advantage=True, reads=("tau_pos", "tau_neg"))
def _sapo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    ratio = log_ratio(inputs.logp, inputs.old_logp, inputs.mask).exp()
    return PolicyLossOutput(sapo(ratio, inputs.advantages, config.tau_pos, config.tau_neg))


def policy_gradient(logp: Tensor, advantages: Tensor) -> Tensor:
    """Compute the REINFORCE loss -A log pi. Any equal shapes."""
    return -advantages * logp


# alpha of GPG is a factor of the advantages
@register_policy_loss("gpg", zero_without_advantage=True, on_policy=True, reads=())
@register_policy_loss("reinforce", zero_without_advantage=True, on_policy=True, reads=())
def _reinforce(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    return PolicyLossOutput(policy_gradient(inputs.logp, inputs.advantages))
