"""Advantages relative to the middle of a group's rewards, and a loss with a square instead of a clip range."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages import Trajectories, register_estimator
from alphaapollo.algorithms.policy_losses import PolicyLossInputs, PolicyLossOutput, register_policy_loss
from alphaapollo.config.schema import Actor, Algorithm


@register_estimator("midrange", scope="trajectories", group=True)
def midrange(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Reward minus the middle between the best and the worst reward of the prompt's group. [N]"""
    groups, scores = trajectories.groups, trajectories.scores
    middle = (groups.max(scores) - groups.max(-scores)) / 2
    return scores - middle[groups.group_index]


@register_policy_loss("squared")
def squared(inputs: PolicyLossInputs, config: Actor) -> PolicyLossOutput:
    """-ratio * advantage + (ratio - 1)^2 / (2 * clip_ratio): a quadratic penalty instead of a clip range. [B, L]"""
    ratio = inputs.log_ratio.exp()
    distance = (ratio - 1.0).square()
    metrics = {"ratio_distance": (distance.detach() * inputs.mask).double().sum()}
    return PolicyLossOutput(-ratio * inputs.advantages + distance / (2 * (config.clip_ratio or 0.2)), metrics)
