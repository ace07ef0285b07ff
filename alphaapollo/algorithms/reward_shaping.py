"""Reward shaping between graders and advantage estimators. The KL in the reward is in kl.py."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.masked import last_action_index


def add_outcome_reward(token_rewards: Tensor, scores: Tensor, mask: Tensor, owners: Tensor) -> None:
    """Add the score of each trajectory, in place, to the last *action* token of its last row.

    The last token of a row may belong to an observation, where the mask would drop the reward.

    Args:
        token_rewards: [B, L] rewards to change.
        scores: [N] score of each trajectory.
        mask: [B, L] 1 on action tokens.
        owners: [B] trajectory of each row, 0 .. N-1 in order.
    """
    rows = torch.bincount(owners, minlength=len(scores)).cumsum(0) - 1
    last = last_action_index(mask)[rows]
    rows, last, scores = rows[last >= 0], last[last >= 0], scores[last >= 0]
    token_rewards[rows, last] += scores


def soft_overlong_punishment(lengths: Tensor, max_length: int, cache: int, factor: float = 1.0) -> Tensor:
    """Compute DAPO's penalty for responses close to the length limit (arXiv 2503.14476, Eq. 13). lengths [B] -> [B].

    The penalty is 0 up to max_length - cache, decreases linearly to -factor at max_length, and is constant beyond.
    max_length includes the cache (paper: 20480 = 16384 + 4096).
    """
    over = (lengths - (max_length - cache)) / cache
    return -factor * over.clamp(0.0, 1.0)


def overlong_filter(mask: Tensor, truncated: Tensor) -> Tensor:
    """Remove truncated rows from the loss mask (arXiv 2503.14476, section 3.4). mask [B, L], truncated [B] -> [B, L].

    The rewards of truncated rows stay in the group statistics.
    """
    return mask * (~truncated.bool()).to(mask.dtype).unsqueeze(1)


def length_budget_exact(rewards: Tensor, lengths: Tensor, budgets: Tensor, coef: float) -> Tensor:
    """Compute r - coef |budget - length| (L1-Exact, arXiv 2503.04697). All [N]; lengths and budgets in tokens."""
    return rewards - coef * (budgets - lengths).abs()


def length_budget_max(rewards: Tensor, lengths: Tensor, budgets: Tensor, coef: float, slack: float = 0.5) -> Tensor:
    """Compute r clip(coef (budget - length) + slack, 0, 1) (L1-Max, arXiv 2503.04697).

    All [N]; lengths and budgets in tokens. Rewards of wrong answers must be 0.
    """
    return rewards * (coef * (budgets - lengths) + slack).clamp(0.0, 1.0)


def condition_reward(rewards: Tensor, condition: Tensor, threshold: float) -> Tensor:
    """Set a reward to 0 where the condition, a second reward, is below the threshold. [B] each -> [B].

    Source: arXiv 2601.05242, section 3.
    """
    return torch.where(condition >= threshold, rewards, torch.zeros_like(rewards))
