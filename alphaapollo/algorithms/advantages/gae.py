"""Advantages per token: REINFORCE, GAE (for PPO with a critic), REINFORCE++ (arXiv 2501.03262, version 9) and ReMax.

The functions get one row per trajectory. Advantages and returns are 0 outside the mask.
"""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import Advantages, register_estimator
from alphaapollo.algorithms.statistics import (
    Groups,
    apply_mask,
    center_in_groups,
    next_action_value,
    reward_to_go,
    standardize,
)

PER_TOKEN = {"scope": "groups", "joins_rows": True, "per_token": True}


@register_estimator(
    "gae",
    *("token_rewards", "values", "mask", "gamma", "lam"),
    **PER_TOKEN,
    whitens=lambda config: config.whiten_advantages,
    needs=("values",),
    reads=("gamma", "lam", "whiten_advantages"),
)
def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Advantages:
    """Compute the GAE advantages A and the returns A + V of action tokens (arXiv 1506.02438, Eq. 16). All [B, L].

    delta_k = R_k + gamma V_{k+1} - V_k, A_k = delta_k + gamma lam A_{k+1}, where k + 1 is the next token with mask 1.
    """
    values = apply_mask(values, mask)
    deltas = token_rewards + gamma * next_action_value(values, mask) - values
    advantages = reward_to_go(deltas, mask, gamma * lam)
    return Advantages(advantages, advantages + values)


@register_estimator("reinforce", "token_rewards", "mask", "baseline", "gamma", "baseline_decay", **PER_TOKEN)
def reinforce(token_rewards: Tensor, mask: Tensor, baseline: float, gamma: float, decay: float | None) -> Advantages:
    """Compute G_k - b (Williams, 1992): the reward-to-go of each action token minus a constant b, which is 0 without
    algorithm.baseline_decay. The gradient is unbiased, because earlier iterations determine b (`next_baseline`)."""
    returns = reward_to_go(token_rewards, mask, gamma)
    return Advantages(returns - (0.0 if decay is None else baseline), returns)


@register_estimator("reinforce_plus_plus", "token_rewards", "mask", "gamma", **PER_TOKEN, whitens=lambda config: True)
def reinforce_plus_plus(token_rewards: Tensor, mask: Tensor, gamma: float) -> Advantages:
    """Compute the rewards-to-go of all action tokens, which the trainer whitens and which usually include a KL penalty
    (arXiv 2501.03262, Eq. 4-5)."""
    returns = reward_to_go(token_rewards, mask, gamma)
    return Advantages(returns, returns)


@register_estimator("reinforce_plus_plus_baseline", "scores", "groups", scope="trajectories", group=True)
def reinforce_pp_baseline(scores: Tensor, groups: Groups, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """Subtract the group mean, then standardize over all samples of the batch (arXiv 2501.03262, Eq. 6-7). [N].

    The authors' code standardizes over tokens instead of samples.
    """
    return standardize(center_in_groups(scores, groups), ddof, eps, eps_in_sqrt=False)


@register_estimator("remax", "token_rewards", "greedy_rewards", "mask", "gamma", **PER_TOKEN, needs=("greedy_rewards",))
def remax(token_rewards: Tensor, baselines: Tensor, mask: Tensor, gamma: float = 1.0) -> Advantages:
    """Subtract the reward of the prompt's greedy rollout from each reward-to-go (arXiv 2310.10505, Algorithm 1).

    Matrices: [B, L]. baselines: [B], the greedy rewards. The returns are the rewards-to-go.
    """
    returns = reward_to_go(token_rewards, mask, gamma)
    return Advantages(apply_mask(returns - baselines.unsqueeze(1), mask), returns)
