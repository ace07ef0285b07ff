"""GRPO with mini-batch normalization (Magistral)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import center_in_groups
from alphaapollo.algorithms.masked import standardize
from alphaapollo.config.schema import Algorithm


def magistral(centered: Tensor, mini_batches: Sequence[Tensor], ddof: int = 1, eps: float = 0.0) -> Tensor:
    """Standardize A = R - group mean over the *sequences* of each mini-batch (arXiv 2506.10910, section 2.1). [N].

    Subtracting the mean again matters only if a mini-batch splits a group. mini_batches: sample indices of each.
    """
    advantages = torch.zeros_like(centered)
    for positions in mini_batches:
        advantages[positions] = standardize(centered[positions], ddof, eps, eps_in_sqrt=False)
    return advantages


@register_estimator("magistral", needs=("mini_batches",), group=True, reads=())
def _magistral(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    """Normalize each mini-batch separately. A mini-batch contains complete groups."""
    assert inputs.mini_batches is not None
    trajectories = Trajectories.from_inputs(inputs)
    step_ids = trajectories.rows.first(inputs.mini_batches)
    mini_batches = [(step_ids == step).nonzero().squeeze(1) for step in step_ids.unique()]
    advantages = magistral(center_in_groups(trajectories.scores, trajectories.groups), mini_batches)
    token_advantages = trajectories.expand_to_tokens(advantages)
    return Advantages(token_advantages, token_advantages)
