"""GDPO: normalize each reward over the samples of a prompt, then sum the rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.advantages.grpo import grpo
from alphaapollo.algorithms.group_statistics import Groups
from alphaapollo.algorithms.masked import standardize
from alphaapollo.config.schema import Algorithm


def gdpo_sum(rewards: Tensor, groups: Groups, weights: Tensor, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Compute the weighted sum of K rewards, each normalized within its group (arXiv 2601.05242, Eq. 4, 5, 7).

    Normalization is (r - mean) / (std + eps). rewards [N, K], weights [K] -> [N].
    """
    normalized = [grpo(reward, groups, ddof, eps) for reward in rewards.unbind(1)]
    return torch.stack(normalized, dim=1) @ weights.to(rewards.dtype)


def _check_gdpo_keys(config: Algorithm, group_size: int) -> None:
    names, weights = config.gdpo_rewards, config.gdpo_weights
    if len(set(names)) < len(names):
        raise ValueError(f"algorithm.gdpo_rewards=[{', '.join(names)}] repeats a name. List each reward once.")
    if len(weights) not in (0, len(names)):
        raise ValueError(
            f"algorithm.gdpo_weights has {len(weights)} entries, but algorithm.gdpo_rewards has {len(names)}. Set one "
            "weight per reward, in the order of gdpo_rewards."
        )
    unused = [name for name in config.gdpo_conditions if names and name not in names]
    if unused:
        raise ValueError(
            f"algorithm.gdpo_conditions sets conditions for [{', '.join(unused)}], but algorithm.gdpo_rewards is only "
            f"[{', '.join(names)}]. Add the missing rewards to gdpo_rewards, or remove their conditions."
        )


@register_estimator(
    "gdpo",
    scope="trajectories",
    needs=("components",),
    group=True,
    reads=("gdpo_rewards", "gdpo_weights", "gdpo_conditions"),
    no_shaping_reason="it sums the named rewards as returned by the reward function",
    check=_check_gdpo_keys,
)
def _gdpo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Compute the weighted sum of normalized rewards, standardized over the whole batch (arXiv 2601.05242, Eq. 6)."""
    assert trajectories.components is not None
    names, weights = _select_rewards(trajectories.components, config)
    conditioned = apply_reward_conditions(trajectories.components, config.gdpo_conditions)
    rewards = torch.stack([conditioned[name] for name in names], dim=1)
    summed = gdpo_sum(rewards, trajectories.groups, rewards.new_tensor(weights))
    return standardize(summed, ddof=1, eps=1e-4, eps_in_sqrt=False)


def apply_reward_conditions(rewards: dict[str, Tensor], conditions: dict[str, tuple[str, float]]) -> dict[str, Tensor]:
    """Set named rewards to 0 where their condition is not met (arXiv 2601.05242, section 3). All [N].

    Example: with conditions {"style": ("accuracy", 1.0)} the reward "style" is 0 where "accuracy" is below 1.
    """
    return rewards | {
        name: torch.where(rewards[other] >= threshold, rewards[name], 0.0)
        for name, (other, threshold) in conditions.items()
    }


def _select_rewards(components: dict[str, Tensor], config: Algorithm) -> tuple[list[str], list[float]]:
    """Return names and weights of the rewards to sum. Raises ValueError if one is missing or not finite."""
    ignored = {"accuracy"} if "task" in components else set()  # both measure correctness, which would count twice
    names = config.gdpo_rewards or sorted(components.keys() - ignored)
    conditioned = [name for key, (other, _) in config.gdpo_conditions.items() for name in (key, other)]
    required = list(dict.fromkeys(names + conditioned))
    missing = [name for name in required if name not in components]
    if missing or not names:
        raise ValueError(
            f"For gdpo, the reward function must return {', '.join(missing) or 'named rewards'}, but it only returns "
            f"[{', '.join(sorted(components))}]. Return a dict with every reward that algorithm.gdpo_rewards and "
            "algorithm.gdpo_conditions name, or change these keys."
        )
    incomplete = [name for name in required if not components[name].isfinite().all()]
    if incomplete:
        raise ValueError(
            f"gdpo needs finite rewards, but [{', '.join(incomplete)}] are missing or not finite in some samples. "
            "Return a finite number for every sample from the reward function."
        )
    return names, config.gdpo_weights or [1.0] * len(names)
