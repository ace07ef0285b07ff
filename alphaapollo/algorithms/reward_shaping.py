"""Change rewards and masks after grading, before advantages are computed. The KL penalty in the reward is in kl.py."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import last_action_index


def add_outcome_reward(token_rewards: Tensor, scores: Tensor, mask: Tensor, trajectory_ids: Tensor) -> None:
    """Add the score of each trajectory, in place, to the last *action* token of its last row (token sequence).

    The last token of a row may belong to an observation, where the mask would drop the reward.

    Args:
        token_rewards: [B, L] rewards to change.
        scores: [N] score of each trajectory.
        mask: [B, L] 1 on action tokens.
        trajectory_ids: [B] trajectory of each row, ascending from 0 to N-1.
    """
    rows = torch.bincount(trajectory_ids, minlength=len(scores)).cumsum(0) - 1
    last = last_action_index(mask)[rows]
    rows, last, scores = rows[last >= 0], last[last >= 0], scores[last >= 0]
    token_rewards[rows, last] += scores


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
