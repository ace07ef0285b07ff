from __future__ import annotations

import math

from alphaapollo.evolving.pool import Judgement
from alphaapollo.evolving.report import compute_calibration

COUNTS = [(3, 0, True), (2, 1, True), (2, 1, False), (0, 3, False)]
VOTES = [(Judgement("", votes_for, votes_against, ""), right) for votes_for, votes_against, right in COUNTS]


def test_votes_and_area_under_curve() -> None:
    calibration = compute_calibration(VOTES)
    assert calibration is not None
    counts = {"true_positive": 5, "false_positive": 2, "false_negative": 1, "true_negative": 4}
    assert (calibration["single"], calibration["candidates"]) == (counts, 4)
    assert calibration["auc"] == 3.5 / 4  # three pairs in order, one tie
    one_kind = compute_calibration(VOTES[:2])
    assert one_kind is not None and math.isnan(one_kind["auc"])
    assert compute_calibration([(Judgement("", 0, 0, ""), True)]) is None, "without votes"
