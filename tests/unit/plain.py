"""Entropy, KL and Jensen-Shannon divergence by definition, to test the head's closed forms."""

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


def jsd(logits: Tensor, other_logits: Tensor, beta: float) -> Tensor:
    """beta KL(q||m) + (1 - beta) KL(p||m), m = beta q + (1 - beta) p. [..., V] each -> [...]"""
    p, q = torch.softmax(logits, dim=-1), torch.softmax(other_logits, dim=-1)
    m = beta * q + (1 - beta) * p
    return beta * (q * (q / m).log()).sum(dim=-1) + (1 - beta) * (p * (p / m).log()).sum(dim=-1)
