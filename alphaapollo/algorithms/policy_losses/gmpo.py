"""GMPO: the geometric mean of token ratios, each clipped in log space."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import MAX_LOG_RATIO, apply_mask, log_ratio, row_mean
from alphaapollo.algorithms.policy_losses.base import (
    CLIP,
    PolicyLossInputs,
    PolicyLossOutput,
    clip_metrics,
    clip_range,
    register_policy_loss,
)
from alphaapollo.config.schema import Actor


def gmpo_ratio(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    limit: float | None = MAX_LOG_RATIO,
) -> tuple[Tensor, Tensor]:
    """Compute g_i = exp(1/|o_i| sum_t c_it), the mean of token ratios clipped in log space (arXiv 2507.20673).

    c = min(d, high) if A_i >= 0, max(d, -low) if A_i < 0, with the log-ratio d. logp, old_logp, mask [B, L],
    advantages [B]. Returns g [B] (1 for an empty row), and a bool [B, L] that is True where the clip is active.
    """
    d = log_ratio(logp, old_logp, mask, limit)
    rising = (advantages >= 0).unsqueeze(1)
    clipped = torch.where(rising, d.clamp(max=high), d.clamp(min=-low))
    return row_mean(clipped, mask).exp(), clipped != d


@register_policy_loss("gmpo", level="sequence", reads=CLIP)
def _gmpo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute -A_i g_i per sequence, with the mean advantage A_i of the row; clip_ratio* are radii in log space."""
    low, high = clip_range(config, 0.4, 0.4)
    advantages = row_mean(inputs.advantages, inputs.mask)
    ratio, clipped = gmpo_ratio(inputs.logp, inputs.old_logp, advantages, inputs.mask, low, high)
    share = row_mean(apply_mask(clipped.to(ratio.dtype), inputs.mask), inputs.mask)
    return PolicyLossOutput(-advantages * ratio, clip_metrics(share, advantages > 0, inputs.mask))
