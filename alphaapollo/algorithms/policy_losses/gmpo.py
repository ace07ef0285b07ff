"""GMPO: the geometric mean of token ratios, each clipped in log space."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import apply_mask, log_ratio, row_mean
from alphaapollo.algorithms.policy_losses.base import (
    CLIP,
    PolicyLossInputs,
    PolicyLossOutput,
    clip_range,
    compute_clip_metrics,
    register_policy_loss,
)
from alphaapollo.config.schema import Actor


def gmpo_ratio(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Compute each row's geometric mean of token ratios, whose logarithms are clipped (arXiv 2507.20673).

    A log-ratio is clipped at high if the advantage of its row is at least 0, else at -low. logp, old_logp, mask [B, L],
    advantages [B]. Returns the means [B] (1 for an empty row), and a bool [B, L] that is True on clipped tokens.
    """
    d = log_ratio(logp, old_logp, mask)
    is_positive = (advantages >= 0).unsqueeze(1)
    clipped = torch.where(is_positive, d.clamp(max=high), d.clamp(min=-low))
    return row_mean(clipped, mask).exp(), clipped != d


@register_policy_loss("gmpo", level="sequence", reads=CLIP)
def _gmpo(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """Compute the GMPO loss of each sequence: -(mean advantage) * gmpo_ratio. clip_ratio* are bounds of log-ratios."""
    low, high = clip_range(config, 0.4, 0.4)
    advantages = row_mean(inputs.advantages, inputs.mask)
    ratio, clipped = gmpo_ratio(inputs.logp, inputs.old_logp, advantages, inputs.mask, low, high)
    share = row_mean(apply_mask(clipped.to(ratio.dtype), inputs.mask), inputs.mask)
    return PolicyLossOutput(-advantages * ratio, compute_clip_metrics(share, advantages > 0, inputs.mask))
