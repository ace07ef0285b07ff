"""CISPO: clip the importance weight instead of the gradient."""

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
)
from alphaapollo.algorithms.policy_losses.ppo import is_clipped
from alphaapollo.config.schema import Actor


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


@register_policy_loss("cispo", reads=(*CLIP, "policy_loss.cispo_mask_low", "policy_loss.cispo_mask_high"))
def _cispo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the CISPO loss. By default the importance weight has no lower bound and the upper bound 1.28."""
    low, high = clip_range(config, math.inf, 0.28)
    mask_low, mask_high = config.policy_loss.cispo_mask_low, config.policy_loss.cispo_mask_high
    ratio = log_ratio(inputs.logp.detach(), inputs.old_logp, inputs.mask).exp()
    loss, clipped = cispo(inputs.logp, ratio, inputs.advantages, low, high, mask_low, mask_high)
    return PolicyLossOutput(loss, compute_clip_metrics(clipped, ratio > 1, inputs.mask))
