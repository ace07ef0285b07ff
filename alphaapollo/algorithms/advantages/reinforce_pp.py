"""REINFORCE++ and its variant with a group baseline (arXiv 2501.03262, version 9)."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, from_scores, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups
from alphaapollo.algorithms.joined_trajectories import JoinedTrajectories
from alphaapollo.algorithms.masked import move_rewards_to_actions, reward_to_go, standardize, whiten
from alphaapollo.config.schema import Algorithm


def reinforce_pp_baseline(scores: Tensor, groups: Groups, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """Subtract the group mean, then standardize over all samples of the batch (arXiv 2501.03262, Eq. 6-7). [N]."""
    return standardize(center_in_groups(scores, groups), ddof, eps, eps_in_sqrt=False)


@register_estimator("reinforce_plus_plus", per_token=True, reads=("gamma",))
def _reinforce_plus_plus(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Whiten the rewards-to-go of all action tokens, which usually include a KL penalty (arXiv 2501.03262, Eq. 4-5)."""
    joined = JoinedTrajectories.from_mask(inputs.mask, inputs.trajectory_ids)
    token_rewards = joined.join(move_rewards_to_actions(inputs.token_rewards, inputs.mask))
    returns = reward_to_go(token_rewards, joined.mask, config.gamma)
    advantages = whiten(returns, joined.mask, ddof=1, eps=1e-8)
    return Advantages(joined.split(advantages), joined.split(returns))


@register_estimator("reinforce_plus_plus_baseline", group=True, reads=())
def _reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Apply reinforce_pp_baseline to the scores. The authors' code standardizes over tokens instead of samples."""
    return from_scores(inputs, reinforce_pp_baseline)
