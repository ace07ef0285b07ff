"""REINFORCE++ and its variant with a group baseline (arXiv 2501.03262, version 9)."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups
from alphaapollo.algorithms.masked import move_rewards_to_actions, reward_to_go, standardize
from alphaapollo.config.schema import Algorithm


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
