"""PF-PPO: train only on the samples of a prompt with reliable rewards, the best and the worst (arXiv 2409.06957).

The paper draws training samples with these probabilities; here each loss is weighted by N times its probability,
which is the expectation of drawing, without its variance.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from alphaapollo.algorithms.group_statistics import Groups


def filtration_weights(scores: Tensor, groups: Groups, method: Literal["best", "best_random", "best_worst"]) -> Tensor:
    """Weights with mean 1 within each group; all 1 if all scores of a group are equal. scores [N] -> [N].

    best: the best sample alone. best_random: half on the best, half spread over the others. best_worst: half on the
    best, half on the worst. Samples with equal scores share the weight.
    """
    best = scores == groups.max(scores)[groups.index]
    match method:
        case "best":
            weights = _split_weight(best, groups)
        case "best_random":
            weights = (_split_weight(best, groups) + _split_weight(~best, groups)) / 2
        case "best_worst":
            worst = scores == -groups.max(-scores)[groups.index]
            weights = (_split_weight(best, groups) + _split_weight(worst, groups)) / 2
    equal = groups.equal(scores)[groups.index]
    return torch.where(equal, torch.ones_like(scores), weights.to(scores.dtype))


def _split_weight(chosen: Tensor, groups: Groups) -> Tensor:
    """Split the total weight of each group equally among its chosen samples. bool [N] -> [N]."""
    share = groups.sizes / groups.sum(chosen.double()).clamp(min=1)
    return share[groups.index] * chosen
