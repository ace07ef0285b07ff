"""Generalized advantage estimation (GAE), for PPO with a critic."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, register_estimator
from alphaapollo.algorithms.masked import apply_mask, move_rewards_to_actions, next_action_value, reward_to_go
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
