"""Self-distillation: the teacher is the policy, or a moving average of it, with more context than the policy.

SDPO (arXiv 2601.20802), SDFT (arXiv 2601.19897). The divergences are in divergence.py.
"""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.masked import log_ratio


def update_moving_average(average: Tensor, value: Tensor, rate: float) -> Tensor:
    """Set average = (1 - rate) average + rate value, in place. Returns `average`. rate: between 0 and 1."""
    return average.lerp_(value, rate)


def truncated_ratios(logp: Tensor, old_logp: Tensor, mask: Tensor, max_ratio: float) -> Tensor:
    """Compute token weights min(pi / pi_old, max_ratio), without gradient (arXiv 2601.20802, `is_clip` of its code).

    [B, L] each: log-probs of the sampled tokens. 1 outside the mask.
    """
    return log_ratio(logp.detach(), old_logp, mask).exp().clamp(max=max_ratio)
