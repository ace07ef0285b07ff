"""PF-PPO: train only on each prompt's best and worst samples, because their rewards are reliable (arXiv 2409.06957).

The paper draws training samples at random. Here each of a prompt's N losses is weighted by N times the probability that
the paper draws this sample, which has the same expectation and no sampling noise.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.group_statistics import Groups


def filtration_weights(scores: Tensor, groups: Groups, method: Literal["best", "best_random", "best_worst"]) -> Tensor:
    """Compute loss weights of samples, with mean 1 in each group; all 1 in groups of equal scores. [N] -> [N].

    method: best puts all weight on the best sample; best_random half on the best, half on all remaining samples;
    best_worst half on the best, half on the worst. Samples with equal scores share the weight.
    """
    best = scores == groups.max(scores)[groups.group_index]
    match method:
        case "best":
            weights = _split_group_weight(best, groups)
        case "best_random":
            weights = (_split_group_weight(best, groups) + _split_group_weight(~best, groups)) / 2
        case "best_worst":
            worst = scores == -groups.max(-scores)[groups.group_index]
            weights = (_split_group_weight(best, groups) + _split_group_weight(worst, groups)) / 2
    is_constant = groups.is_constant(scores)[groups.group_index]
    return torch.where(is_constant, torch.ones_like(scores), weights.to(scores.dtype))


def _split_group_weight(is_selected: Tensor, groups: Groups) -> Tensor:
    """Split each group's total weight, its size, equally among its selected samples. is_selected: bool [N] -> [N]."""
    share = groups.sizes / groups.sum(is_selected.double()).clamp(min=1)
    return share[groups.group_index] * is_selected
