"""GiGPO: compare the trajectories of a group, and the turns of a group that start from the same state."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, from_scores, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups, normalize_in_groups
from alphaapollo.algorithms.joined_trajectories import JoinedTrajectories
from alphaapollo.algorithms.masked import reward_to_go
from alphaapollo.config.schema import Algorithm


@register_estimator(
    "gigpo",
    needs=("turns",),
    group=True,
    per_token=True,
    reads=("gamma", "gigpo_step_weight", "norm_adv_by_std_in_grpo"),
)
def _gigpo(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Compute A^E(trajectory) + omega A^S(turn) for each token of a turn (arXiv 2505.10978, Eq. 3, 7, 8).

    A^E normalizes trajectory rewards within a group of trajectories. A^S normalizes the discounted returns of turns
    within the turns of one anchor state. Both are (x - mean) / (std + eps), or x - mean.
    """
    assert inputs.turns is not None
    turns = inputs.turns
    returns = discounted_returns(turns.rewards(inputs.token_rewards), turns.trajectory_ids, config.gamma)
    turn_advantages = _group_advantages(returns, Groups.from_ids(turns.anchors), config)
    episode_advantages = from_scores(
        inputs, lambda scores, groups: _group_advantages(scores, groups, config)
    ).advantages
    advantages = episode_advantages + config.gigpo_step_weight * turns.expand_to_tokens(turn_advantages) * inputs.mask
    return Advantages(advantages, turns.expand_to_tokens(returns) * inputs.mask)


def _group_advantages(values: Tensor, groups: Groups, config: Algorithm) -> Tensor:
    center_only = config.norm_adv_by_std_in_grpo is False
    return center_in_groups(values, groups) if center_only else normalize_in_groups(values, groups)


def discounted_returns(rewards: Tensor, trajectory_ids: Tensor, gamma: float) -> Tensor:
    """Compute R_t = r_t + gamma R_{t+1} over the turns of each trajectory (Eq. 5). [M] -> [M], turns in order."""
    joined = JoinedTrajectories.from_mask(torch.ones_like(rewards)[:, None], trajectory_ids)
    return joined.split(reward_to_go(joined.join(rewards[:, None]), joined.mask, gamma))[:, 0]
