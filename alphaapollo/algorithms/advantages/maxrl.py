"""MaxRL: advantages of maximum likelihood reinforcement learning."""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups
from alphaapollo.config.schema import Algorithm


def maxrl(scores: Tensor, groups: Groups) -> Tensor:
    """Compute (R - mean) / mean within each group (arXiv 2602.02710); 0 in groups with a mean of at most 0. [N] -> [N].

    For rewards of 0 and 1 and groups of n samples, the policy gradient is unbiased for the first n - 1 terms of the
    gradient of log p, where p is the success rate: sum over j < n - 1 of (1 - p)^j grad p.
    """
    means = groups.mean(scores)
    scale = torch.where(means > 0, 1.0 / means, 0.0)
    return center_in_groups(scores, groups, means) * scale[groups.group_index]


@register_estimator(
    "maxrl",
    scope="trajectories",
    group=True,
    reads=(),
    no_shaping_reason="it divides by the group's mean reward, which must be a success rate",
)
def _maxrl(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Raises ValueError for a negative reward, with which the mean is not a success rate."""
    if (lowest := float(trajectories.scores.min())) < 0:
        raise ValueError(
            f"algorithm.adv_estimator=maxrl needs rewards of at least 0, but got {lowest:g}. Return 0 for a wrong "
            "answer, or set algorithm.adv_estimator=grpo."
        )
    return maxrl(trajectories.scores, trajectories.groups)
