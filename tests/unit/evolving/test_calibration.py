from __future__ import annotations

import math

import pytest

from alphaapollo.evolving.pool import Judgement
from alphaapollo.evolving.report import (
    ConfusionMatrix,
    compute_area_under_curve,
    compute_best_of_n,
    compute_majority_of_k,
    compute_roc_curve,
    compute_vote_confusion_matrix,
)

COUNTS = [(3, 0, True), (2, 1, True), (2, 1, False), (0, 3, False)]
VOTES = [(Judgement("", votes_for, votes_against, ""), right) for votes_for, votes_against, right in COUNTS]


def test_single_votes() -> None:
    found = compute_vote_confusion_matrix(VOTES)
    assert found == ConfusionMatrix(5, 2, 1, 4)
    assert (found.true_positive_rate, found.false_positive_rate) == (5 / 6, 2 / 6)
    assert found.balanced_accuracy == pytest.approx(0.75)
    assert math.isnan(ConfusionMatrix(1, 0, 1, 0).false_positive_rate), "no wrong candidate"


def test_area_under_curve_is_the_share_of_ordered_pairs() -> None:
    points = compute_roc_curve(VOTES)
    assert points == [(0, 0), (0, 0.5), (0.5, 1), (1, 1)]
    assert compute_area_under_curve(points) == 3.5 / 4  # three pairs in order, one tie
    assert compute_roc_curve(VOTES[:2]) == [] and math.isnan(compute_area_under_curve([]))


def test_best_of_n() -> None:
    assert compute_best_of_n(VOTES, 1) == pytest.approx(2 / 4)
    assert compute_best_of_n(VOTES, 2) == pytest.approx((1 + 1 + 1 + 0.5 + 1 + 0) / 6)  # AB AC AD BC BD CD
    assert compute_best_of_n(VOTES, 4) == 1
    assert math.isnan(compute_best_of_n(VOTES, 5))


def test_majority_of_k() -> None:
    one, two, three = (compute_majority_of_k(VOTES, k) for k in (1, 2, 3))
    assert vars(one) == pytest.approx(vars(ConfusionMatrix(5 / 3, 2 / 3, 1 / 3, 4 / 3)))
    assert vars(two) == pytest.approx(vars(ConfusionMatrix(4 / 3, 1 / 3, 2 / 3, 5 / 3)))  # a tie is against
    assert three == ConfusionMatrix(2, 1, 0, 1)
    assert compute_majority_of_k(VOTES, 4) == ConfusionMatrix(0, 0, 0, 0)
