"""GRPO and Dr. GRPO: the group mean is the baseline."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import center_in_groups, normalize_in_groups
from alphaapollo.config.schema import Algorithm


@register_estimator("grpo", scope="trajectories", group=True, reads=("norm_adv_by_std_in_grpo",))
def _grpo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Compute (R - mean) / (std + eps) within each group (arXiv 2402.03300, section 4.1.2)."""
    normalize = center_in_groups if config.norm_adv_by_std_in_grpo is False else normalize_in_groups
    return normalize(trajectories.scores, trajectories.groups)


@register_estimator("dr_grpo", scope="trajectories", group=True, reads=())
def _dr_grpo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Compute R - mean within each group (arXiv 2503.20783). Use with loss_agg_mode=seq-mean-token-sum-norm."""
    return center_in_groups(trajectories.scores, trajectories.groups)
