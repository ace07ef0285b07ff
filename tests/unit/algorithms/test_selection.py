"""Samples that algorithm.filtration selects, and what a selection does to the expected gradient."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import pytest
import torch

from alphaapollo.algorithms.reward_shaping import count_lowest_of_max_variance, filtration_weights, select_samples
from alphaapollo.algorithms.statistics import Groups

NOISE = torch.tensor([0.3, 0.9, 0.1, 0.8, 0.2])


@pytest.mark.parametrize(
    ("method", "selected"),
    [
        ("max_variance", [True, False, True, True, False]),  # variance 17.1; that of 0, 8 and 9 is 16.2
        ("extremes", [True, False, False, True, True]),  # 0; 8 and 9
        ("random", [True, False, True, False, True]),  # the smallest noise
    ],
)
def test_selected_samples_by_hand(method: Any, selected: list[bool]) -> None:
    scores = torch.tensor([0.0, 4.0, 0.5, 9.0, 8.0], dtype=torch.float64)
    found = select_samples(scores, Groups.from_ids(torch.zeros(5, dtype=torch.int64)), 3, method, NOISE)
    assert found.tolist() == selected


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("best", [0, 2, 2, 0]),
        ("best_random", [1, 1, 1, 1]),  # two best share 2, two others share 2
        ("best_worst", [2, 1, 1, 0]),
    ],
)
def test_weights_by_hand(method: Any, weights: list[float]) -> None:
    """The second group is all equal. The mean weight of each group is one."""
    scores = torch.tensor([0.0, 1.0, 1.0, 0.5, 7.0, 7.0], dtype=torch.float64)
    groups = Groups.from_ids(torch.tensor([0, 0, 0, 0, 1, 1]))
    assert filtration_weights(scores, groups, method).tolist() == [*weights, 1, 1]
    random = torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = filtration_weights(random, Groups.from_ids(torch.arange(24) // 6), method)
    assert found.view(4, 6).mean(1) == pytest.approx([1.0] * 4)


def test_each_group_is_selected_from_alone() -> None:
    scores = torch.tensor([5.0, 1.0, 3.0, 7.0, 2.0], dtype=torch.float64)
    groups = Groups.from_ids(torch.tensor([4, 1, 4, 4, 1]))
    found = select_samples(scores, groups, 2, "max_variance", NOISE)
    assert found.tolist() == [False, True, True, True, True], "group 1 has only two samples"


@pytest.mark.parametrize("seed", range(20))
def test_max_variance_equals_the_best_of_all_subsets(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(2, 9, (), generator=generator))
    scores = torch.randn(n, generator=generator, dtype=torch.float64)
    scores = scores.round() if seed % 2 else scores  # with ties
    for size in range(2, n + 1):
        selected = select_samples(scores, Groups.from_ids(torch.zeros(n)), size, "max_variance", scores)
        best = max(float(scores[list(one)].var(correction=0)) for one in combinations(range(n), size))
        assert int(selected.sum()) == size
        assert float(scores[selected].var(correction=0)) == pytest.approx(best, abs=1e-12)


def test_among_equal_variances_the_halves_are_even() -> None:
    for scores in ([0.7] * 6, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]):
        assert count_lowest_of_max_variance(torch.tensor(scores), 4) == 2


def expected_gradients(n: int, m: int, p: float, method: Any, baseline: str) -> float:
    """E[mean of A_i d log pi(a_i)] over the selected samples, divided by the true gradient of E[R], by enumeration.

    A policy of one parameter answers correctly (reward 1) with probability p. A_i = R_i minus the mean reward, of the
    selected or of all samples. All draws of the random selection are enumerated.
    """
    total = 0.0
    for rewards in product((0.0, 1.0), repeat=n):
        scores = torch.tensor(rewards, dtype=torch.float64)
        groups = Groups.from_ids(torch.zeros(n))
        if method == "random":
            draws = [[i in one for i in range(n)] for one in combinations(range(n), m)]
        else:
            draws = [select_samples(scores, groups, m, method, scores).tolist()]
        probability = math.prod(p if reward else 1 - p for reward in rewards) / len(draws)
        for draw in draws:
            chosen = scores[torch.tensor(draw)]
            mean = (chosen if baseline == "selected" else scores).mean()
            total += probability * float(((chosen - mean) * (chosen - p)).mean())
    return total / (p * (1 - p))


TABLE = {  # of docs/algorithms/ppo.md, for n = 6 and m = 3, at p = 0.1, 0.5 and 0.9
    ("random", "selected"): (0.667, 0.667, 0.667),
    ("random", "all"): (0.833, 0.833, 0.833),
    ("max_variance", "selected"): (1.157, 0.861, 1.157),
    ("max_variance", "all"): (1.532, 0.927, 1.303),
    ("extremes", "selected"): (1.157, 0.861, 1.157),
    ("extremes", "all"): (1.532, 0.927, 1.303),
}


@pytest.mark.parametrize(("method", "baseline"), list(TABLE))
def test_expected_gradients_are_those_of_the_page(method: str, baseline: str) -> None:
    found = [expected_gradients(6, 3, p, method, baseline) for p in (0.1, 0.5, 0.9)]
    assert found == pytest.approx(TABLE[method, baseline], abs=5e-4)


def test_all_samples_for_the_baseline_are_unbiased_up_to_a_constant() -> None:
    """With all samples in the update, and a random selection, the factor is (n - 1) / n for any p."""
    assert [expected_gradients(6, 6, p, "random", "all") for p in (0.1, 0.7)] == pytest.approx([5 / 6, 5 / 6])
