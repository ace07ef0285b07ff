"""A small run of `python -m tests.invariance.check`: every estimator with every loss once."""

from tests.invariance.check import PAIRS_PER_CASE, check, check_sessions
from tests.invariance.settings import pairs


def test_results_do_not_depend_on_the_layout_of_trajectories():
    cases = -(-len(pairs()) // PAIRS_PER_CASE)
    report = check(seed=1, cases=cases, quick=True)
    assert report.failures == []
    assert report.pairs == set(pairs())
    assert report.comparisons >= cases * PAIRS_PER_CASE


def test_sessions_of_an_agent_give_the_results_of_one_row():
    report = check_sessions(seed=2, sessions=300)
    assert report.failures == []
    assert report.pairs == set(pairs())
