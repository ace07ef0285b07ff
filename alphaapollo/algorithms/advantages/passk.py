"""Two estimators for pass@k training, which rewards a group of samples for its best ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from alphaapollo.algorithms.advantages.base import Trajectories, register_estimator
from alphaapollo.algorithms.group_statistics import Groups
from alphaapollo.config.schema import Algorithm


def passk_leave_one_out(
    scores: Tensor, groups: Groups, std_norm: bool = False, ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """Compute how much each sample raises the best score of its group (arXiv 2503.19595). [N] -> [N].

    A_i = max_j R_j - max_{j != i} R_j, so only a unique best sample has a non-zero advantage; 0 in a group of one.
    std_norm divides by the group's std + eps, which the paper's formula does not.
    """
    best = groups.max(scores)
    is_best = scores == best[groups.group_index]
    unique = groups.sum(is_best.to(scores.dtype)) == 1
    second = groups.max(torch.where(is_best, torch.full_like(scores, -math.inf), scores))
    gain = torch.where(unique & (groups.sizes > 1), best - second, torch.zeros_like(best))
    if std_norm:
        gain = gain / (groups.std(scores, ddof) + eps)
    return torch.where(is_best, gain[groups.group_index], torch.zeros_like(scores))


def passk_analytic(correct: Tensor, groups: Groups, k: int) -> Tensor:
    """Compute pass@k advantages of binary rewards in closed form (arXiv 2508.10751). correct 0/1 [N] -> [N] float64.

    For a group of N samples, W of them wrong: R = 1 - C(W, k)/C(N, k), s = sqrt(R (1 - R)), and the advantage is
    (1 - R)/s of correct samples, (1 - R - C(W - 1, k - 1)/C(N - 1, k - 1))/s of wrong ones. It is 0 if s = 0 or N < k.

    Raises ValueError if no group has k samples, or a reward is neither 0 nor 1.
    """
    bad = correct[(correct != 0) & (correct != 1)]
    if len(bad):
        raise ValueError(
            f"grpo_passk_analytic needs rewards of 0 or 1, but got {bad[0]:g}. Set algorithm.adv_estimator=grpo_passk."
        )
    if (largest := int(groups.sizes.max())) < k:
        raise ValueError(
            f"algorithm.passk_k={k} needs a group of at least {k} samples, but the largest group has {largest} "
            "samples that did not fail. Raise env.rollout.n or lower algorithm.passk_k."
        )
    wrong = groups.sum(1 - correct)
    pairs = [_compute_group_advantages(int(size), int(num), k) for size, num in zip(groups.sizes, wrong, strict=True)]
    table = torch.tensor(pairs, dtype=torch.float64, device=correct.device)[groups.group_index]
    return torch.where(correct > 0, table[:, 0], table[:, 1])


def _compute_group_advantages(group_size: int, num_wrong: int, k: int) -> tuple[float, float]:
    """Compute the advantages (correct sample, wrong sample) of one group with the formula of passk_analytic."""
    if group_size < k:
        return 0.0, 0.0
    all_fail = math.comb(num_wrong, k) / math.comb(group_size, k)
    std = math.sqrt(all_fail * (1.0 - all_fail))
    if std == 0.0:
        return 0.0, 0.0
    all_fail_given_one = math.comb(num_wrong - 1, k - 1) / math.comb(group_size - 1, k - 1)
    return all_fail / std, (all_fail - all_fail_given_one) / std


@register_estimator("grpo_passk", scope="trajectories", group=True, reads=("norm_adv_by_std_in_grpo",))
def _grpo_passk(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return passk_leave_one_out(trajectories.scores, trajectories.groups, bool(config.norm_adv_by_std_in_grpo))


def _check_passk_k(config: Algorithm, group_size: int) -> None:
    if config.passk_k > group_size:
        raise ValueError(
            f"algorithm.passk_k={config.passk_k} must not exceed the group size, env.rollout.n={group_size}. "
            "Raise env.rollout.n or lower algorithm.passk_k."
        )


@register_estimator(
    "grpo_passk_analytic",
    scope="trajectories",
    group=True,
    reads=("passk_k",),
    no_shaping_reason="its closed form needs rewards of 0 or 1",
    check=_check_passk_k,
)
def _grpo_passk_analytic(trajectories: Trajectories, config: Algorithm) -> Tensor:
    return passk_analytic(trajectories.scores, trajectories.groups, config.passk_k).to(trajectories.scores.dtype)
