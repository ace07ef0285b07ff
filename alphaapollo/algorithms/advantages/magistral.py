"""Magistral: subtract the group mean, then standardize over each mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
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


@register_estimator("magistral", scope="trajectories", needs=("mini_batches",), group=True, reads=())
def _magistral(trajectories: Trajectories, config: Algorithm) -> Tensor:
    assert trajectories.mini_batches is not None
    return magistral(center_in_groups(trajectories.scores, trajectories.groups), trajectories.mini_batches)
