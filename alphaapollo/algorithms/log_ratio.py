"""Log-prob differences, with one numerical clamp for all losses."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.masked import masked

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this value before exp (a ratio of 4.9e8), so that float32 stays finite."""


def log_ratio(logp: Tensor, base_logp: Tensor, mask: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """logp - base_logp on action tokens, clamped to +-limit (gradient 0 beyond); 0 off the mask. [B, L] -> [B, L]."""
    return clamp_symmetric(masked(logp - base_logp, mask), limit)


def clamp_symmetric(values: Tensor, limit: float | None) -> Tensor:
    """Clamp to +-limit; None: unchanged."""
    return values if limit is None else values.clamp(-limit, limit)
