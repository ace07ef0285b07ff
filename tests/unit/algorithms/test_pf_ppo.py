from __future__ import annotations

import pytest
import torch

from alphaapollo.algorithms.reward_shaping import filtration_weights
from alphaapollo.algorithms.statistics import Groups

SCORES = torch.tensor([0.0, 1.0, 1.0, 0.5, 7.0, 7.0], dtype=torch.float64)
GROUPS = Groups.from_ids(torch.tensor([0, 0, 0, 0, 1, 1]))  # the second one is all equal


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("best", [0, 2, 2, 0]),
        ("best_random", [1, 1, 1, 1]),  # two best share 2, two others share 2
        ("best_worst", [2, 1, 1, 0]),
    ],
)
def test_weights_by_hand(method: str, weights: list[float]) -> None:
    assert filtration_weights(SCORES, GROUPS, method).tolist() == [*weights, 1, 1]


@pytest.mark.parametrize("method", ["best", "best_random", "best_worst"])
def test_mean_weight_is_one(method: str) -> None:
    torch.manual_seed(0)
    scores, ids = torch.randn(24, dtype=torch.float64), torch.arange(24) // 6
    weights = filtration_weights(scores, Groups.from_ids(ids), method)
    assert weights.view(4, 6).mean(1) == pytest.approx([1.0] * 4)
