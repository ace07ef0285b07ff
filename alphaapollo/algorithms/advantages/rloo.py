"""REINFORCE Leave-One-Out."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups
from alphaapollo.config.schema import Algorithm


def rloo(scores: Tensor, groups: Groups) -> Tensor:
    """Subtract from each score the mean of the other scores in its group (arXiv 2402.14740). [N] -> [N]."""
    sizes = groups.sizes.to(scores.dtype)
    factor = sizes / (sizes - 1).clamp(min=1)
    return factor[groups.group_index] * center_in_groups(scores, groups)


@register_estimator("rloo", scope="trajectories", group=True, reads=())
def _rloo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return rloo(trajectories.scores, trajectories.groups)
