"""Magistral: subtract the group mean, then standardize over each mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import center_in_groups
from alphaapollo.algorithms.masked import standardize
from alphaapollo.config.schema import Algorithm


def magistral(centered: Tensor, mini_batch_ids: Tensor, ddof: int = 1, eps: float = 0.0) -> Tensor:
    """Standardize rewards over the *sequences* of each mini-batch (arXiv 2506.10910, section 2.1). [N] -> [N].

    Args:
        centered: [N] reward minus group mean.
        mini_batch_ids: [N] mini-batch of each sequence.
    """
    advantages = torch.zeros_like(centered)
    for mini_batch_id in mini_batch_ids.unique():
        inside = mini_batch_ids == mini_batch_id
        advantages[inside] = standardize(centered[inside], ddof, eps, eps_in_sqrt=False)
    return advantages


@register_estimator("magistral", needs=("mini_batches",), group=True, reads=())
def _magistral(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    assert inputs.mini_batches is not None
    trajectories = Trajectories.from_inputs(inputs)
    centered = center_in_groups(trajectories.scores, trajectories.groups)
    mini_batch_ids = trajectories.rows_by_trajectory.take_value_per_group(inputs.mini_batches)
    return trajectories.expand_to_tokens(magistral(centered, mini_batch_ids))
