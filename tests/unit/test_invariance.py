"""A small run of `python -m tests.invariance.check`: every estimator with every loss once."""

import pytest

from tests.invariance.check import PAIRS_PER_CASE, check
from tests.invariance.settings import pairs


@pytest.mark.timeout(240)
def test_results_do_not_depend_on_the_layout_of_trajectories():
    cases = -(-len(pairs()) // PAIRS_PER_CASE)
    report = check(seed=1, cases=cases, quick=True)
    assert report.failures == []
    assert report.pairs == set(pairs())
    assert report.comparisons >= cases * PAIRS_PER_CASE
