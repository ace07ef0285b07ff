"""OPO: on-policy RL with the optimal baseline."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups
from alphaapollo.config.schema import Algorithm


def opo(scores: Tensor, lengths: Tensor, groups: Groups) -> Tensor:
    """Subtract from each score the length-weighted mean score of its group (arXiv 2505.23585). [N] each -> [N].

    lengths: number of action tokens. The mean is 0 in a group without action tokens, which has nothing to train on.
    """
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return center_in_groups(scores, groups, baseline)


@register_estimator("opo", group=True, on_policy=True, reads=())
def _opo(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    trajectories = Trajectories.from_inputs(inputs)
    return trajectories.expand_to_tokens(opo(trajectories.scores, trajectories.lengths, trajectories.groups))
