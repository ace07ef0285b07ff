"""OPO: on-policy RL with the optimal baseline."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups
from alphaapollo.config.schema import Algorithm


def opo(scores: Tensor, lengths: Tensor, groups: Groups) -> Tensor:
    """Subtract from each score the length-weighted mean score of its group (arXiv 2505.23585). [N] each -> [N].

    lengths: number of action tokens. The mean is 0 in a group without action tokens, which has nothing to train on.
    """
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return center_in_groups(scores, groups, baseline)


@register_estimator("opo", scope="trajectories", group=True, on_policy=True, reads=())
def _opo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return opo(trajectories.scores, trajectories.lengths, trajectories.groups)
