"""GDPO: normalize each reward separately before summing."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, normalize_in_groups
from alphaapollo.algorithms.masked import standardize
from alphaapollo.algorithms.reward_shaping import condition_reward
from alphaapollo.config.schema import Algorithm


def gdpo_sum(components: Tensor, groups: Groups, weights: Tensor, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Compute the weighted sum of K rewards, each normalized within its group (arXiv 2601.05242, Eq. 4, 5, 7).

    Normalization is (r - mean) / (std + eps). components [N, K], weights [K] -> [N].
    """
    columns = [normalize_in_groups(column, groups, ddof, eps) for column in components.unbind(1)]
    return torch.stack(columns, dim=1) @ weights.to(components.dtype)


def _check_reward_names(config: Algorithm, group_size: int) -> None:
    names, weights = config.gdpo_rewards, config.gdpo_weights
    if len(set(names)) < len(names):
        raise ValueError(f"algorithm.gdpo_rewards names a reward twice: {', '.join(names)}. List each name once.")
    if len(weights) not in (0, len(names)):
        raise ValueError(
            f"algorithm.gdpo_weights has {len(weights)} entries, but algorithm.gdpo_rewards has {len(names)}. Set one "
            "weight per reward, in the order of gdpo_rewards."
        )
    unused = [name for name in config.gdpo_conditions if names and name not in names]
    if unused:
        raise ValueError(
            f"algorithm.gdpo_conditions names {', '.join(unused)}, which is not in algorithm.gdpo_rewards. "
            "Add it to gdpo_rewards or remove the condition."
        )


@register_estimator(
    "gdpo",
    needs=("components",),
    group=True,
    reads=("gdpo_rewards", "gdpo_weights", "gdpo_conditions"),
    no_shaping_reason="it sums the named rewards as returned by the reward function",
    check=_check_reward_names,
)
def _gdpo(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Standardize the weighted sum of normalized rewards over all samples of the batch (Eq. 6)."""
    assert inputs.components is not None
    trajectories = Trajectories.from_inputs(inputs)
    names, weights = _select_rewards(inputs.components, config)
    rewards = apply_conditions(inputs.components, config.gdpo_conditions)
    components = torch.stack([trajectories.rows.first(rewards[name]) for name in names], dim=1)
    summed = gdpo_sum(components, trajectories.groups, components.new_tensor(weights))
    advantages = trajectories.expand_to_tokens(standardize(summed, ddof=1, eps=1e-4, eps_in_sqrt=False))
    return Advantages(advantages, advantages)


def apply_conditions(rewards: dict[str, Tensor], conditions: dict[str, tuple[str, float]]) -> dict[str, Tensor]:
    """Set rewards to 0 where their condition is not met (arXiv 2601.05242, section 3). name -> [B].

    A condition {name: (other, threshold)} is met where the reward `other`, before conditions, reaches the threshold.
    """
    return rewards | {
        name: condition_reward(rewards[name], rewards[other], threshold)
        for name, (other, threshold) in conditions.items()
    }


def _default_reward_names(components: dict[str, Tensor]) -> list[str]:
    """Return the rewards to sum if algorithm.gdpo_rewards is empty.

    Excludes `accuracy` if `task` exists: both measure correctness, which would count twice.
    """
    return sorted(name for name in components if not (name == "accuracy" and "task" in components))


def _select_rewards(components: dict[str, Tensor], config: Algorithm) -> tuple[list[str], list[float]]:
    """Return names and weights of the rewards to sum. Raises ValueError if the reward function does not return them."""
    names = config.gdpo_rewards or _default_reward_names(components)
    conditioned = [name for key, (other, _) in config.gdpo_conditions.items() for name in (key, other)]
    required = list(dict.fromkeys(names + conditioned))
    missing = [name for name in required if name not in components]
    if missing or not names:
        raise ValueError(
            f"gdpo needs named rewards{': ' + ', '.join(missing) if missing else ''}; the reward function returns "
            f"{', '.join(sorted(components)) or 'none'}. Return a dict of rewards, or fix algorithm.gdpo_rewards "
            "and algorithm.gdpo_conditions."
        )
    incomplete = [name for name in required if not components[name].isfinite().all()]
    if incomplete:
        raise ValueError(
            f"gdpo: the reward {', '.join(incomplete)} is missing or not finite for some trajectories. "
            "Return a finite number for every sample from the reward function."
        )
    return names, config.gdpo_weights or [1.0] * len(names)
