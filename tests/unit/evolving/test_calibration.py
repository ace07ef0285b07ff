from __future__ import annotations

import math

from alphaapollo.evolving.pool import Judgement
from alphaapollo.evolving.report import compute_area_under_curve, count_single_votes

COUNTS = [(3, 0, True), (2, 1, True), (2, 1, False), (0, 3, False)]
VOTES = [(Judgement("", votes_for, votes_against, ""), right) for votes_for, votes_against, right in COUNTS]


def test_single_votes() -> None:
    counts = {"true_positive": 5, "false_positive": 2, "false_negative": 1, "true_negative": 4}
    assert count_single_votes(VOTES) == counts


def test_area_under_curve_is_the_share_of_ordered_pairs() -> None:
    assert compute_area_under_curve(VOTES) == 3.5 / 4  # three pairs in order, one tie
    assert math.isnan(compute_area_under_curve(VOTES[:2]))
