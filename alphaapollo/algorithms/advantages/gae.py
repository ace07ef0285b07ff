"""Advantages per token: REINFORCE, GAE (for PPO with a critic), REINFORCE++ (arXiv 2501.03262, version 9) and ReMax."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, Trajectories, register_estimator
from alphaapollo.algorithms.statistics import (
    Groups,
    apply_mask,
    center_in_groups,
    move_rewards_to_actions,
    next_action_value,
    reward_to_go,
    standardize,
)
from alphaapollo.config.schema import Algorithm


def gae(token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute the GAE advantages A and the returns A + V of action tokens (arXiv 1506.02438, Eq. 16). All [B, L].

    delta_k = R_k + gamma V_{k+1} - V_k, A_k = delta_k + gamma lam A_{k+1}, where k + 1 is the next action token (mask
    1). Both results are 0 outside the mask.
    """
    values = apply_mask(values, mask)
    deltas = token_rewards + gamma * next_action_value(values, mask) - values
    advantages = reward_to_go(deltas, mask, gamma * lam)
    return advantages, advantages + values


@register_estimator(
    "gae",
    scope="groups",
    whitens=lambda config: config.whiten_advantages,
    needs=("values",),
    per_token=True,
    reads=("gamma", "lam", "whiten_advantages"),
)
def _gae(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    assert inputs.values is not None
    joined = inputs.join_rows()
    token_rewards = joined.join(move_rewards_to_actions(inputs.token_rewards, inputs.mask))
    advantages, returns = gae(token_rewards, joined.join(inputs.values), joined.mask, config.gamma, config.lam)
    return Advantages(joined.split(advantages), joined.split(returns))


@register_estimator("reinforce", scope="groups", per_token=True, reads=("gamma", "baseline_decay"))
def _reinforce(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Compute G_k - b (Williams, 1992): the reward-to-go of each action token minus a constant, 0 without
    algorithm.baseline_decay. The gradient is unbiased, because earlier iterations determine b (`next_baseline`)."""
    joined = inputs.join_rows()
    token_rewards = joined.join(move_rewards_to_actions(inputs.token_rewards, inputs.mask))
    returns = reward_to_go(token_rewards, joined.mask, config.gamma)
    baseline = 0.0 if config.baseline_decay is None else inputs.baseline
    return Advantages(joined.split(returns - baseline), joined.split(returns))


def next_baseline(config: Algorithm, baseline: float | None, mean_return: float) -> float | None:
    """Update the moving average of mean returns; without baseline_decay, it does not change. None: no average yet."""
    decay = config.baseline_decay
    if decay is None or baseline is None:
        return baseline if decay is None else mean_return
    return decay * baseline + (1.0 - decay) * mean_return


def reinforce_pp_baseline(scores: Tensor, groups: Groups, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """Subtract the group mean, then standardize over all samples of the batch (arXiv 2501.03262, Eq. 6-7). [N]."""
    return standardize(center_in_groups(scores, groups), ddof, eps, eps_in_sqrt=False)


@register_estimator(
    "reinforce_plus_plus", scope="groups", whitens=lambda config: True, per_token=True, reads=("gamma",)
)
def _reinforce_plus_plus(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Whiten the rewards-to-go of all action tokens, which usually include a KL penalty (arXiv 2501.03262, Eq. 4-5)."""
    joined = inputs.join_rows()
    token_rewards = joined.join(move_rewards_to_actions(inputs.token_rewards, inputs.mask))
    returns = joined.split(reward_to_go(token_rewards, joined.mask, config.gamma))
    return Advantages(returns, returns)


@register_estimator("reinforce_plus_plus_baseline", scope="trajectories", group=True, reads=())
def _reinforce_plus_plus_baseline(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Apply reinforce_pp_baseline to the scores. The authors' code standardizes over tokens instead of samples."""
    return reinforce_pp_baseline(trajectories.scores, trajectories.groups)


def remax(token_rewards: Tensor, baselines: Tensor, mask: Tensor, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """Subtract the reward of the prompt's greedy rollout from each reward-to-go (arXiv 2310.10505, Algorithm 1).

    Returns (advantages, rewards-to-go), 0 outside the mask. Matrices: [B, L]. baselines: [B], the greedy rewards.
    """
    returns = reward_to_go(token_rewards, mask, gamma)
    return apply_mask(returns - baselines.unsqueeze(1), mask), returns


@register_estimator("remax", scope="groups", needs=("greedy_rewards",), per_token=True, reads=("gamma",))
def _remax(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    assert inputs.greedy_rewards is not None
    joined = inputs.join_rows()
    token_rewards = joined.join(move_rewards_to_actions(inputs.token_rewards, inputs.mask))
    baselines = joined.rows_by_trajectory.take_value_per_group(inputs.greedy_rewards)
    advantages, returns = remax(token_rewards, baselines, joined.mask, config.gamma)
    return Advantages(joined.split(advantages), joined.split(returns))
