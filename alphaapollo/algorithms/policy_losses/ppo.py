"""PPO's clipped surrogate, with asymmetric bounds (DAPO's clip-higher) and the dual clip."""

from __future__ import annotations

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


@register_policy_loss("ppo", reads=(*CLIP, "clip_ratio_c"))
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
