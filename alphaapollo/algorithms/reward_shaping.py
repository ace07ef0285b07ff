"""Change rewards and select samples after grading, before advantages are computed. kl.py has the KL penalty."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.statistics import Groups


def soft_overlong_punishment(lengths: Tensor, max_length: int, cache: int, factor: float = 1.0) -> Tensor:
    """Compute DAPO's length penalty, a reward between -factor and 0 (arXiv 2503.14476, Eq. 13). [B] -> [B].

    It is 0 up to a length of max_length - cache tokens, and decreases linearly to -factor at max_length. The paper uses
    max_length = 20480 and cache = 4096.
    """
    over = (lengths - (max_length - cache)) / cache
    return -factor * over.clamp(0.0, 1.0)


def apply_length_budget(
    rewards: Tensor, lengths: Tensor, budgets: Tensor, mode: Literal["exact", "max"], coef: float
) -> Tensor:
    """Compute the rewards of L1 (arXiv 2503.04697), with lengths in tokens. All [N].

    exact: reward - coef |budget - length|. max: reward * clip(coef (budget - length) + 0.5, 0, 1), which expects a
    reward of 0 for wrong answers.
    """
    if mode == "exact":
        return rewards - coef * (budgets - lengths).abs()
    return rewards * (coef * (budgets - lengths) + 0.5).clamp(0.0, 1.0)


def filtration_weights(scores: Tensor, groups: Groups, method: Literal["best", "best_random", "best_worst"]) -> Tensor:
    """Compute PF-PPO's loss weights of samples (arXiv 2409.06957), with mean 1 in each group; all 1 in groups of equal
    scores. [N] -> [N]. The paper draws training samples at random; the weights have the same expectation without noise.

    method: best puts all weight on the best sample; best_random puts half on the best and half on all other samples;
    best_worst puts half on the best and half on the worst. Samples with equal scores share the weight.
    """
    is_best = scores == groups.max(scores)[groups.group_index]
    match method:
        case "best":
            weights = _split_group_weight(is_best, groups)
        case "best_random":
            weights = (_split_group_weight(is_best, groups) + _split_group_weight(~is_best, groups)) / 2
        case "best_worst":
            is_worst = scores == -groups.max(-scores)[groups.group_index]
            weights = (_split_group_weight(is_best, groups) + _split_group_weight(is_worst, groups)) / 2
    is_constant = groups.is_constant(scores)[groups.group_index]
    return torch.where(is_constant, torch.ones_like(scores), weights.to(scores.dtype))


def select_samples(scores: Tensor, groups: Groups, size: int, method: str | None, noise: Tensor) -> Tensor:
    """Select `size` samples of each group, or all samples of a smaller group. Returns bool [N].

    method: max_variance maximizes the variance of the selected scores; extremes selects size // 2 of the lowest
    scores and the rest from the highest; random selects the samples with the smallest noise. scores, noise: [N].
    """
    selected = torch.zeros_like(scores, dtype=torch.bool)
    for members in groups.group_index.argsort(stable=True).split(groups.sizes.tolist()):
        order = members[(noise if method == "random" else scores)[members].argsort(stable=True)]
        num_selected = min(size, len(order))
        num_lowest = num_selected if method == "random" else num_selected // 2
        if method == "max_variance":
            num_lowest = count_lowest_of_max_variance(scores[order], num_selected)
        selected[order[:num_lowest]] = True
        selected[order[len(order) - (num_selected - num_lowest) :]] = True
    return selected


def count_lowest_of_max_variance(ascending: Tensor, size: int) -> int:
    """Return k such that the k lowest and the size - k highest of n sorted scores have the largest variance of all
    subsets of this size (arXiv 2504.13818, section 3: such a k exists). Of several, return the k closest to size / 2.

    ascending: the sorted scores [n]. The function takes O(n) operations.
    """
    centered = ascending - ascending.mean()
    prefix_sums = [torch.nn.functional.pad(values.cumsum(0), (1, 0)) for values in (centered, centered**2)]
    k = torch.arange(size + 1)
    first_high = len(ascending) - size + k  # position of the lowest of the size - k highest scores
    means, mean_squares = ((sums[k] + sums[-1] - sums[first_high]) / size for sums in prefix_sums)
    variances = mean_squares - means**2
    best_k = (variances >= variances.max() * (1.0 - 1e-9)).nonzero()[:, 0]
    return int(best_k[(best_k - size / 2).abs().argmin()])


def _split_group_weight(is_selected: Tensor, groups: Groups) -> Tensor:
    """Split each group's total weight, its size, equally among its selected samples. is_selected: bool [N] -> [N]."""
    share = groups.sizes / groups.sum(is_selected.double()).clamp(min=1)
    return share[groups.group_index] * is_selected
