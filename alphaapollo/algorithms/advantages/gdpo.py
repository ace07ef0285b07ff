"""GDPO: each reward normalised by itself, so that none drowns in another."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import (
    AdvantageInputs,
    Advantages,
    Trajectories,
    epsilon,
    register_estimator,
)
from alphaapollo.algorithms.groups import Groups, Singleton, normalised
from alphaapollo.algorithms.masked import standardised
from alphaapollo.config.schema import Algorithm


def gdpo_sum(
    components: Tensor,
    groups: Groups,
    weights: Tensor,
    ddof: int = 1,
    eps: float = 1e-4,
    singleton: Singleton = "zero",
) -> Tensor:
    """Weighted sum over rewards of (r_n - mean) / (std + eps) within the group (arXiv 2601.05242, Eq. 4, 5, 7).

    components [N, K], weights [K] -> [N].
    """
    columns = [normalised(column, groups, ddof=ddof, eps=eps, singleton=singleton) for column in components.unbind(1)]
    return torch.stack(columns, dim=1) @ weights.to(components.dtype)


@register_estimator("gdpo", needs=("components",), group=True)
def _gdpo(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """The sum, standardised over all samples of the batch (Eq. 6)."""
    assert inputs.components is not None
    trajectories = Trajectories.of(inputs)
    names, weights = _named_rewards(inputs.components, config.gdpo_rewards, config.gdpo_weights)
    components = torch.stack([trajectories.per_trajectory(inputs.components[name]) for name in names], dim=1)
    eps = epsilon(config, 1e-4)
    summed = gdpo_sum(
        components, trajectories.groups, components.new_tensor(weights), config.adv_ddof, eps, config.adv_singleton
    )
    advantages = trajectories.on_tokens(standardised(summed, config.adv_ddof, eps, eps_inside=False))
    return Advantages(advantages, advantages)


def _named_rewards(
    components: dict[str, Tensor], rewards: list[str], weights: list[float]
) -> tuple[list[str], list[float]]:
    """The rewards to sum and their weights. Raises ValueError where the reward function does not give them."""
    names = rewards or sorted(components)
    missing = [name for name in names if name not in components]
    if missing or not names:
        raise ValueError(
            f"gdpo needs named rewards{': ' + ', '.join(missing) if missing else ''}; the reward function gives "
            f"{', '.join(sorted(components)) or 'none'}. Return a dict from it, or mend algorithm.gdpo_rewards."
        )
    weights = weights or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(
            f"algorithm.gdpo_weights has {len(weights)} entries for the {len(names)} rewards {', '.join(names)}; give "
            "one each, and name the rewards in algorithm.gdpo_rewards."
        )
    unscored = [name for name in names if not components[name].isfinite().all()]
    if unscored:
        raise ValueError(
            f"gdpo: the reward {', '.join(unscored)} is missing or not finite for some trajectories; the reward "
            "function must give it for all."
        )
    return names, weights
