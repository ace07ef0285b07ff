from __future__ import annotations

import math

import pytest

from alphaapollo.evolving.calibration import Confusion, Votes, area_under, best_of, confusion, majority_of, roc

VOTES = [Votes(3, 0, True), Votes(2, 1, True), Votes(2, 1, False), Votes(0, 3, False)]


def test_single_votes() -> None:
    found = confusion(VOTES)
    assert found == Confusion(5, 2, 1, 4)
    assert (found.true_positive_rate, found.false_positive_rate) == (5 / 6, 2 / 6)
    assert found.balanced_accuracy == pytest.approx(0.75)
    assert math.isnan(Confusion(1, 0, 1, 0).false_positive_rate), "nothing was wrong"


def test_the_area_is_the_share_of_pairs_in_order() -> None:
    points = roc(VOTES)
    assert points == [(0, 0), (0, 0.5), (0.5, 1), (1, 1)]
    assert area_under(points) == 3.5 / 4  # three pairs in order, one tie
    assert roc(VOTES[:2]) == [] and math.isnan(area_under([]))


def test_best_of_n_is_the_mean_over_all_draws() -> None:
    assert best_of(VOTES, 1) == pytest.approx(2 / 4)
    assert best_of(VOTES, 2) == pytest.approx((1 + 1 + 1 + 0.5 + 1 + 0) / 6)  # AB AC AD BC BD CD
    assert best_of(VOTES, 4) == 1
    assert math.isnan(best_of(VOTES, 5))


def test_majorities_of_fewer_votes() -> None:
    one, two, three = (majority_of(VOTES, k) for k in (1, 2, 3))
    assert vars(one) == pytest.approx(vars(Confusion(5 / 3, 2 / 3, 1 / 3, 4 / 3)))
    assert vars(two) == pytest.approx(vars(Confusion(4 / 3, 1 / 3, 2 / 3, 5 / 3)))  # a tie is against
    assert three == Confusion(2, 1, 0, 1)
    assert majority_of(VOTES, 4) == Confusion(0, 0, 0, 0)
