"""GiGPO: compare the trajectories of a group, and the turns of a group that start from the same environment state."""

from __future__ import annotations

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, from_scores, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups, normalize_in_groups
from alphaapollo.algorithms.masked import reward_to_go
from alphaapollo.config.schema import Algorithm


@register_estimator(
    "gigpo",
    scope="groups",
    needs=("turns",),
    group=True,
    per_token=True,
    compares_states=True,
    reads=("gamma", "gigpo_step_weight", "norm_adv_by_std_in_grpo"),
)
def _gigpo(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Compute trajectory advantage + gigpo_step_weight * turn advantage of each token (arXiv 2505.10978, Eq. 8).

    The trajectory advantage normalizes rewards over the trajectories of a prompt (Eq. 3). The turn advantage normalizes
    discounted returns over the turns that start from the same environment state (Eq. 7).
    """
    assert inputs.turns is not None
    turns = inputs.turns
    rewards, joined = turns.join(turns.sum_rewards(inputs.token_rewards))
    returns = joined.split(reward_to_go(rewards, joined.mask, config.gamma))[:, 0]  # Eq. 5
    normalize = center_in_groups if config.norm_adv_by_std_in_grpo is False else normalize_in_groups
    turn_advantages = normalize(returns, Groups.from_ids(turns.anchor_ids))
    episode_advantages = from_scores(inputs, normalize).advantages
    advantages = episode_advantages + config.gigpo_step_weight * turns.expand_to_tokens(turn_advantages)
    return Advantages(advantages, turns.expand_to_tokens(returns))
