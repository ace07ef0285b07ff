"""Entropy and full KL as they are defined, differentiated by autograd: what the head's closed forms are held to."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """-sum_v p_v log p_v. [..., V] -> [...]"""
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp).sum(dim=-1)


def kl_full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(p||q) = sum_v p_v (log p_v - log q_v). [..., V] each -> [...]"""
    logp, ref_logp = torch.log_softmax(logits, dim=-1), torch.log_softmax(ref_logits, dim=-1)
    return (logp.exp() * (logp - ref_logp)).sum(dim=-1)
