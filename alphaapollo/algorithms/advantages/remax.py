"""ReMax: the reward of the greedy rollout is the baseline."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, register_estimator
from alphaapollo.algorithms.masked import apply_mask, move_rewards_to_actions, reward_to_go
from alphaapollo.config.schema import Algorithm


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
