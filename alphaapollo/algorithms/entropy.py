"""Entropy of the policy's distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v over the vocabulary. [..., V] -> [...]. Gradient: -p_v (log p_v + H).

    The bonus enters the loss as -entropy_coeff * aggregate(H).
    """
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp).sum(dim=-1)
