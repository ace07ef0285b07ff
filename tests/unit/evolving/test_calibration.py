from __future__ import annotations

import math

from alphaapollo.evolving.pool import Judgement
from alphaapollo.evolving.report import (
    ConfusionMatrix,
    compute_area_under_curve,
    compute_vote_confusion_matrix,
)

COUNTS = [(3, 0, True), (2, 1, True), (2, 1, False), (0, 3, False)]
VOTES = [(Judgement("", votes_for, votes_against, ""), right) for votes_for, votes_against, right in COUNTS]


def test_single_votes() -> None:
    found = compute_vote_confusion_matrix(VOTES)
    assert found == ConfusionMatrix(5, 2, 1, 4)
    assert (found.true_positive_rate, found.false_positive_rate) == (5 / 6, 2 / 6)
    assert math.isnan(ConfusionMatrix(1, 0, 1, 0).false_positive_rate), "no wrong candidate"


def test_area_under_curve_is_the_share_of_ordered_pairs() -> None:
    assert compute_area_under_curve(VOTES) == 3.5 / 4  # three pairs in order, one tie
    assert math.isnan(compute_area_under_curve(VOTES[:2]))
