"""GRPO with mini-batch normalization (Magistral)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import (
    AdvantageInputs,
    Advantages,
    Trajectories,
    register_estimator,
)
from alphaapollo.algorithms.groups import Groups, Singleton, deviations
from alphaapollo.algorithms.masked import standardize
from alphaapollo.config.schema import Algorithm


def magistral(
    scores: Tensor,
    groups: Groups,
    mini_batches: Sequence[Tensor] | None = None,
    ddof: int = 1,
    eps: float = 0.0,
    singleton: Singleton = "zero",
) -> Tensor:
    """A = R - group mean, then (A - mean) / std over the *sequences* of each mini-batch (arXiv 2506.10910, section
    2.1). [N] -> [N]. mini_batches: sample indices of each; None = one mini-batch with all samples.

    The mean is subtracted again: this matters only if a mini-batch splits a group.
    """
    centered = deviations(scores, groups, singleton=singleton)
    if mini_batches is None:
        return standardize(centered, ddof, eps, eps_inside=False)
    advantages = torch.zeros_like(centered)
    for positions in mini_batches:
        advantages[positions] = standardize(centered[positions], ddof, eps, eps_inside=False)
    return advantages


@register_estimator("magistral", needs=("mini_batches",), group=True, reads=())
def _magistral(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Normalize each mini-batch separately. A mini-batch contains complete groups."""
    assert inputs.mini_batches is not None
    trajectories = Trajectories.of(inputs)
    numbers = trajectories.per_trajectory(inputs.mini_batches)
    advantages = magistral(
        trajectories.scores,
        trajectories.groups,
        [(numbers == number).nonzero().squeeze(1) for number in numbers.unique()],
    )
    on_tokens = trajectories.on_tokens(advantages)
    return Advantages(on_tokens, on_tokens)
