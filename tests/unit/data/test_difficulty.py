from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from alphaapollo.data.difficulty import decay_pass_rate, difficulty_weights, draw_prompts, frontier_weights

NEVER = float("nan")


def test_pass_rates_decay() -> None:
    assert decay_pass_rate(NEVER, 0.25, decay=0.5) == 0.25
    assert decay_pass_rate(0.25, 0.75, decay=0.5) == 0.5
    assert decay_pass_rate(0.25, 0.75, decay=0.0) == 0.75


def test_frontier_prefers_the_target() -> None:
    weights = frontier_weights(np.array([0.0, 0.25, 0.5, 1.0, NEVER]), target=0.5, lowest=0.05)
    assert weights.tolist() == [0.05, 0.75, 1.0, 0.05, 1.0]  # 4 r (1 - r)
    rates = np.array([0.1, 0.2, 0.3])  # (r / .2)^.4 * ((1 - r) / .8)^1.6
    expected = [0.5**0.4 * 1.125**1.6, 1.0, 1.5**0.4 * 0.875**1.6]
    assert frontier_weights(rates, target=0.2, lowest=0.01) == pytest.approx(expected)


def test_difficulty_pools_include_their_highest_pass_rate() -> None:
    rates = np.array([0.0, 0.25, 0.26, 0.75, 0.76, 1.0, NEVER])
    assert difficulty_weights(rates).tolist() == [0.2, 0.2, 1.0, 1.0, 0.2, 0.2, 1.0]


def test_draws_follow_the_weights() -> None:
    """10,000 draws of one position each: 10, 30 and 60 %, within five standard deviations."""
    weights = np.array([1.0, 3.0, 0.0, 6.0])
    counts = Counter(index for position in range(10_000) for index in draw_prompts(weights, [position], 0, ()))
    assert counts.keys() == {0, 1, 3}
    for index, share in ((0, 0.1), (1, 0.3), (3, 0.6)):
        assert abs(counts[index] / 10_000 - share) < 5 * (share * (1 - share) / 10_000) ** 0.5


def test_a_draw_depends_on_seed_position_and_the_prompts_taken_before() -> None:
    weights = np.ones(100)
    together = draw_prompts(weights, range(40, 80), 7, {3, 5})
    one_by_one: list[int] = []
    for position in range(40, 80):
        one_by_one += draw_prompts(weights, [position], 7, {3, 5, *one_by_one})
    assert together == one_by_one
    assert len({*together, 3, 5}) == 42
    assert draw_prompts(weights, range(40, 80), 8, {3, 5}) != together


def test_prompts_repeat_only_if_all_are_taken() -> None:
    weights = np.array([1.0, 0.0, 1e-9])
    assert sorted(draw_prompts(weights, [0, 1], 0, ())) == [0, 2]
    assert draw_prompts(weights, [5], 0, {0}) == [2]
    assert draw_prompts(weights, [0, 1, 2], 0, {0, 2}) == [0, 0, 0]
