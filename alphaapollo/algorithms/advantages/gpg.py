"""GPG: group policy gradient."""

from __future__ import annotations

from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups, normalize_in_groups
from alphaapollo.config.schema import Algorithm


def gpg_alpha(scores: Tensor, groups: Groups) -> Tensor:
    """Compute the factor alpha = B / (B - M) of GPG's advantages, a scalar (arXiv 2504.02546, Eq. 7); 1 if M = B.

    B: number of samples. M: number of samples in groups with zero reward variance, which have no gradient.
    """
    num_constant = groups.is_constant(scores)[groups.group_index].sum()
    num_samples = scores.numel()
    informative = num_samples - num_constant if num_constant < num_samples else num_samples
    return scores.new_tensor(num_samples) / informative


def gpg(scores: Tensor, groups: Groups, std_norm: bool = False, ddof: int = 1, eps: float = 0.0) -> Tensor:
    """Compute gpg_alpha() * (score - mean), divided by the group's std if std_norm (arXiv 2504.02546). [N] -> [N]."""
    centered = normalize_in_groups(scores, groups, ddof, eps) if std_norm else center_in_groups(scores, groups)
    return gpg_alpha(scores, groups) * centered


@register_estimator("gpg", scope="trajectories", group=True, reads=("norm_adv_by_std_in_grpo",))
def _gpg(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return gpg(trajectories.scores, trajectories.groups, bool(config.norm_adv_by_std_in_grpo))
