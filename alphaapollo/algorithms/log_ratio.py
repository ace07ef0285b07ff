"""Differences of log-probs, with one numerical guard for all losses."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.masked import masked

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: a ratio of 4.9e8 is beyond anything training meets, and float32 stays finite."""


def log_ratio(logp: Tensor, base_logp: Tensor, mask: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """logp - base_logp on action tokens, cut to +-limit (gradient 0 beyond); 0 off the mask. [B, L] -> [B, L]."""
    return clamp_symmetric(masked(logp - base_logp, mask), limit)


def clamp_symmetric(values: Tensor, limit: float | None) -> Tensor:
    """Clamp to +-limit; None leaves the values alone."""
    return values if limit is None else values.clamp(-limit, limit)
