"""OPO: on-policy RL with the optimal baseline."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import AdvantageInputs, Advantages, Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups
from alphaapollo.config.schema import Algorithm


def opo(scores: Tensor, lengths: Tensor, groups: Groups) -> Tensor:
    """Compute R - b with b = sum_j l_j R_j / sum_j l_j over the group (arXiv 2505.23585). [N] each -> [N].

    l_j is the response length.
    A group without action tokens has b = 0; it has no tokens to train on.
    """
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return center_in_groups(scores, groups, baseline)


@register_estimator("opo", group=True, on_policy=True, reads=())
def _opo(inputs: AdvantageInputs, config: Algorithm) -> Advantages:
    trajectories = Trajectories.from_inputs(inputs)
    centered = opo(trajectories.scores, trajectories.lengths, trajectories.groups)
    advantages = trajectories.expand_to_tokens(centered)
    return Advantages(advantages, advantages)
