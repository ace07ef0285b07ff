"""CISPO: clip the importance weight instead of the gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alphaapollo.algorithms.log_ratio import log_ratio
from alphaapollo.algorithms.policy_losses.base import (
    CLIP,
    PolicyLossInputs,
    PolicyLossOutput,
    clip_metrics,
    old_policy_kl,
    register_policy_loss,
)
from alphaapollo.algorithms.policy_losses.ppo import is_clipped
from alphaapollo.config.schema import Actor


def cispo(
    logp: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    low: float | None,
    high: float,
    mask_low: float | None = None,
    mask_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi (arXiv 2506.13585, Eq. 4-5); low=None: no lower bound, as the paper.

    mask_low/high: the unified form (Eq. 6-7), which also drops tokens with A > 0, r > 1 + mask_high or A < 0,
    r < 1 - mask_low; both dropped from the loss, not from its denominator. All [B, L].
    Returns the loss and a bool matrix: weight clipped or token dropped.
    """
    ratio = ratio.detach()
    weight = ratio.clamp(None if low is None else 1.0 - low, 1.0 + high)
    dropped = is_clipped(
        ratio,
        advantages,
        math.inf if mask_low is None else mask_low,
        math.inf if mask_high is None else mask_high,
    )
    loss = torch.where(dropped, torch.zeros_like(logp), -weight * advantages * logp)
    return loss, dropped | (weight != ratio)


@register_policy_loss("cispo", reads=(*CLIP, "policy_loss.cispo_mask_low", "policy_loss.cispo_mask_high"))
def _cispo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Default bounds: no lower one, 0.28 above. clip_ratio or clip_ratio_low set a lower one."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    options = config.policy_loss
    ratio = log_ratio(inputs.logp.detach(), inputs.old_logp, inputs.mask).exp()
    loss, clipped = cispo(
        inputs.logp,
        ratio,
        inputs.advantages,
        low,
        0.28 if high is None else high,
        options.cispo_mask_low,
        options.cispo_mask_high,
    )
    return PolicyLossOutput(
        loss, {**clip_metrics(clipped, ratio > 1, inputs.mask), "old_policy_kl": old_policy_kl(inputs)}
    )
