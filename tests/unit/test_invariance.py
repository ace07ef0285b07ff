"""A small run of `python -m tests.invariance.check`: every estimator with every loss once."""

import pytest

from tests.invariance.check import PAIRS_A_CASE, check
from tests.invariance.settings import pairs


@pytest.mark.timeout(240)
def test_the_same_trajectories_teach_the_same_however_they_are_laid_out():
    cases = -(-len(pairs()) // PAIRS_A_CASE)
    report = check(seed=1, cases=cases, quick=True)
    assert report.failures == []
    assert report.pairs == set(pairs())
    assert report.comparisons >= cases * PAIRS_A_CASE
