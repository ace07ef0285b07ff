"""Value loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    vpreds: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute the clipped value loss of each token: 0.5 max((V - R)^2, (clip(V, V_old +- clip) - R)^2). [B, L] each.

    With clip=None the loss is 0.5 (V - R)^2. Returns the loss, 0 outside the mask, and a bool matrix that is True where
    clipping is active (gradient 0). Value clipping is from the OpenAI baselines code, not from the PPO paper.
    """
    is_action = mask.bool()
    unclipped = torch.where(is_action, vpreds - returns, torch.zeros_like(vpreds)) ** 2
    if clip is None:
        return 0.5 * unclipped, torch.zeros_like(is_action)
    clipped_values = vpreds.clamp(old_values - clip, old_values + clip)
    clipped = torch.where(is_action, clipped_values - returns, torch.zeros_like(vpreds)) ** 2
    return 0.5 * torch.maximum(unclipped, clipped), clipped > unclipped
