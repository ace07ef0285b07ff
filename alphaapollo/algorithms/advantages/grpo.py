"""GRPO and the estimators that differ from it in the baseline or the scale of a group.

grpo, dr_grpo   the group's mean; divided by the standard deviation, or not
rloo            the mean of the other samples
opo             the length-weighted mean
gpg             the mean; scaled by the share of groups with a gradient
maxrl           the mean; divided by the mean
magistral       the mean; then standardized over each mini-batch
"""

from __future__ import annotations

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups, center_in_groups
from alphaapollo.algorithms.masked import standardize
from alphaapollo.config.schema import Algorithm


def grpo(scores: Tensor, groups: Groups, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Compute (R - mean) / (std + eps) within each group (arXiv 2402.03300, section 4.1.2). [N] -> [N].

    Groups of equal rewards get exactly 0, also with eps=0.
    """
    spread = groups.std(scores, ddof) + eps
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    return center_in_groups(scores, groups) / spread[groups.group_index]


@register_estimator("grpo", scope="trajectories", group=True, reads=("norm_adv_by_std_in_grpo",))
def _grpo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Apply grpo to the scores, without the division if algorithm.norm_adv_by_std_in_grpo=false."""
    normalize = center_in_groups if config.norm_adv_by_std_in_grpo is False else grpo
    return normalize(trajectories.scores, trajectories.groups)


@register_estimator("dr_grpo", scope="trajectories", group=True, reads=())
def _dr_grpo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    """Compute R - mean within each group (arXiv 2503.20783). Use with loss_agg_mode=seq-mean-token-sum-norm."""
    return center_in_groups(trajectories.scores, trajectories.groups)


def rloo(scores: Tensor, groups: Groups) -> Tensor:
    """Subtract from each score the mean of the other scores in its group (arXiv 2402.14740). [N] -> [N]."""
    sizes = groups.sizes.to(scores.dtype)
    factor = sizes / (sizes - 1).clamp(min=1)
    return factor[groups.group_index] * center_in_groups(scores, groups)


@register_estimator("rloo", scope="trajectories", group=True, reads=())
def _rloo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return rloo(trajectories.scores, trajectories.groups)


def opo(scores: Tensor, lengths: Tensor, groups: Groups) -> Tensor:
    """Subtract from each score the length-weighted mean score of its group (arXiv 2505.23585). [N] each -> [N].

    lengths: number of action tokens. The mean is 0 in a group without action tokens, which has nothing to train on.
    """
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    return center_in_groups(scores, groups, baseline)


@register_estimator("opo", scope="trajectories", group=True, on_policy=True, reads=())
def _opo(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return opo(trajectories.scores, trajectories.lengths, trajectories.groups)


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
    centered = grpo(scores, groups, ddof, eps) if std_norm else center_in_groups(scores, groups)
    return gpg_alpha(scores, groups) * centered


@register_estimator("gpg", scope="trajectories", group=True, reads=("norm_adv_by_std_in_grpo",))
def _gpg(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return gpg(trajectories.scores, trajectories.groups, bool(config.norm_adv_by_std_in_grpo))


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
