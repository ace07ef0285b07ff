"""Change rewards and masks after grading, before advantages are computed. The KL penalty in the reward is in kl.py."""

from __future__ import annotations

from torch import Tensor


def soft_overlong_punishment(lengths: Tensor, max_length: int, cache: int, factor: float = 1.0) -> Tensor:
    """Compute DAPO's length penalty, a reward between -factor and 0 (arXiv 2503.14476, Eq. 13). [B] -> [B].

    It is 0 up to a length of max_length - cache tokens, and decreases linearly to -factor at max_length. The paper uses
    max_length = 20480 and cache = 4096.
    """
    over = (lengths - (max_length - cache)) / cache
    return -factor * over.clamp(0.0, 1.0)


def overlong_filter(mask: Tensor, truncated: Tensor) -> Tensor:
    """Set the loss mask [B, L] to 0 where truncated [B] is true (DAPO, arXiv 2503.14476, section 3.4)."""
    return mask * (~truncated.bool()).to(mask.dtype).unsqueeze(1)


def apply_exact_budget(rewards: Tensor, lengths: Tensor, budgets: Tensor, coef: float) -> Tensor:
    """Compute reward - coef |budget - length|, with lengths in tokens (L1-Exact, arXiv 2503.04697). All [N]."""
    return rewards - coef * (budgets - lengths).abs()


def apply_max_budget(rewards: Tensor, lengths: Tensor, budgets: Tensor, coef: float, slack: float = 0.5) -> Tensor:
    """Compute reward * clip(coef (budget - length) + slack, 0, 1), with lengths in tokens. All [N].

    This is L1-Max of arXiv 2503.04697, which expects a reward of 0 for wrong answers.
    """
    return rewards * (coef * (budgets - lengths) + slack).clamp(0.0, 1.0)
