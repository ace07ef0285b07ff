"""Credit per turn: GAE whose time step is a turn, group baselines of each turn, and GiGPO."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import (
    AdvantageInputs,
    Advantages,
    Trajectories,
    Turns,
    from_scores,
    register_estimator,
)
from alphaapollo.algorithms.advantages.gae import gae
from alphaapollo.algorithms.advantages.grpo import normalize, rloo
from alphaapollo.algorithms.statistics import Groups, reward_to_go
from alphaapollo.config.schema import Algorithm


@register_estimator(
    "turn_gae",
    *("token_rewards", "values", "turns", "gamma", "lam"),
    scope="groups",
    whitens=lambda config: config.whiten_advantages,
    needs=("values", "turns"),
    per_token=True,
    reads=("gamma", "lam", "whiten_advantages"),
)
def turn_gae(token_rewards: Tensor, values: Tensor, turns: Turns, gamma: float, lam: float) -> Advantages:
    """Compute GAE (arXiv 1506.02438, Eq. 16) with one time step per turn. All [B, L].

    R_k is the sum of the rewards of turn k, V_k the value at its first action token, and V = 0 after the last turn. All
    action tokens of a turn get its advantage A_k and its return A_k + V_k; other tokens get 0.
    """
    rewards, joined = turns.join(turns.sum_rewards(token_rewards))
    first_values, _ = turns.join(turns.take_first_values(values))
    results = gae(rewards, first_values, joined.mask, gamma, lam)
    return Advantages(*(turns.expand_to_tokens(joined.split(result)[:, 0]) for result in results))


def turn_group(
    returns: Tensor, mask: Tensor, groups: Groups, baseline: Literal["return_all", "return_alive"]
) -> Tensor:
    """Subtract from the return of each turn k the mean return from turn k of the other trajectories in the group.

    return_all: the return of a trajectory that ended before turn k is 0. return_alive: only trajectories that reach
    turn k count; a turn that no other trajectory reaches keeps its return. Both are unbiased, because the baseline of a
    turn does not depend on the trajectory's own actions. All advantages are 0 in a group of one.

    Args:
        returns: [N, K] rewards-to-go of N trajectories with at most K turns.
        mask: [N, K], 1 on the turns of a trajectory.
        groups: groups the N trajectories by prompt.

    Returns advantages [N, K], 0 outside the mask.
    """
    is_turn = mask.bool()
    is_compared = is_turn if baseline == "return_alive" else torch.ones_like(is_turn)
    group_index = groups.group_index[:, None].expand_as(mask)[is_compared]
    turn_index = torch.arange(mask.shape[1]).expand_as(mask)[is_compared]
    same_turns = Groups.from_ids(group_index * mask.shape[1] + turn_index)  # by prompt and index of the turn
    is_alone = (same_turns.sizes == 1)[same_turns.group_index] & (groups.sizes > 1)[group_index]
    advantages = torch.zeros_like(returns)
    advantages[is_compared] = torch.where(is_alone, returns[is_compared], rloo(returns[is_compared], same_turns))
    return advantages * mask


@register_estimator(
    "turn_group", scope="groups", needs=("turns",), group=True, per_token=True, reads=("gamma", "turn_baseline")
)
def _turn_group(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    assert inputs.turns is not None
    rewards, joined = inputs.turns.join(inputs.turns.sum_rewards(inputs.token_rewards))
    returns = reward_to_go(rewards, joined.mask, config.gamma)
    groups = Trajectories.from_inputs(inputs).groups
    advantages = turn_group(returns, joined.mask, groups, config.turn_baseline)
    expanded = [inputs.turns.expand_to_tokens(joined.split(values)[:, 0]) for values in (advantages, returns)]
    return Advantages(*expanded)


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
    std_norm = config.norm_adv_by_std_in_grpo
    turn_advantages = normalize(returns, Groups.from_ids(turns.anchor_ids), std_norm)
    episode_advantages = from_scores(inputs, lambda scores, groups: normalize(scores, groups, std_norm)).advantages
    advantages = episode_advantages + config.gigpo_step_weight * turns.expand_to_tokens(turn_advantages)
    return Advantages(advantages, turns.expand_to_tokens(returns))
