from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaapollo.observability.estimates import compute_bootstrap_interval, pass_at_k
from alphaapollo.observability.majority_vote import majority_accuracy


def pass_at(n: int, c: int, largest_k: int) -> list[float]:
    return pass_at_k(np.array([n]), np.array([c]), largest_k)[0].tolist()


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_sample(n: int) -> None:
    for c in range(n + 1):
        correct = [1] * c + [0] * (n - c)
        exact = [np.mean([max(subset) for subset in combinations(correct, k)]) for k in range(1, n + 1)]
        np.testing.assert_allclose(pass_at(n, c, n), exact, rtol=0, atol=1e-14)


def test_pass_at_k_of_many_samples_is_exact() -> None:
    got = pass_at(1000, 3, 1000)
    assert got[99] == pytest.approx(float(1 - comb(997, 100) / comb(1000, 100)), abs=1e-12)
    assert got[996] == pytest.approx(1 - comb(997, 997) / comb(1000, 997), abs=1e-12)
    assert got[997] == 1.0  # only three wrong ones can be left out


def test_problems_with_fewer_samples_have_no_large_k() -> None:
    got = pass_at_k(np.array([2, 3, 0]), np.array([1, 1, 0]), 3)
    np.testing.assert_allclose(got, [[1 / 2, 1, np.nan], [1 / 3, 2 / 3, 1], [np.nan] * 3])


def test_majority_of_a_grader_that_is_not_sure() -> None:
    assert majority_accuracy(["a", "a", "a", "b"], [1, 0, 1, 0]) == pytest.approx(2 / 3)


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(0, 1)), max_size=9))
def test_majority_is_the_mean_over_the_ways_to_break_ties(samples: list) -> None:
    by_answer: dict = {}
    for answer, accuracy in samples:
        if answer is not None:
            by_answer.setdefault(answer, []).append(accuracy)
    most = max(map(len, by_answer.values()), default=0)
    winners = [np.mean(own) for own in by_answer.values() if len(own) == most]
    exact = np.mean(winners) if winners else 0.0
    assert majority_accuracy([one[0] for one in samples], [one[1] for one in samples]) == pytest.approx(exact)


def test_the_interval_is_that_of_all_resamples() -> None:
    values = np.array([[0.0, 1.0], [0.25, 1.0], [1.0, 0.0], [0.5, 1.0], [0.75, 0.0]])
    means = np.array([values[list(drawn)].mean(axis=0) for drawn in product(range(5), repeat=5)])
    for level, bounds, options in ((0.95, [0.025, 0.975], {"resamples": 50_000}), (0.5, [0.25, 0.75], {})):
        exact = np.quantile(means, bounds, axis=0)
        np.testing.assert_allclose(compute_bootstrap_interval(values, level=level, **options), exact, atol=0.011)


def test_the_interval_is_a_function_of_values_and_seed() -> None:
    """Neither the order of the problems nor other figures matter."""
    generator = np.random.default_rng(3)
    values = generator.random((300, 3))
    values[:50, 1] = np.nan
    one = compute_bootstrap_interval(values)
    assert np.array_equal(one, compute_bootstrap_interval(generator.permutation(values)))
    assert not np.array_equal(one, compute_bootstrap_interval(values, seed=1))
    np.testing.assert_allclose(compute_bootstrap_interval(values[:, :1])[:, 0], one[:, 0])


def test_problems_without_a_value_do_not_count() -> None:
    values = np.array([[0.2, np.nan], [0.4, 0.5], [0.6, np.nan], [0.8, np.nan]])
    bounds = compute_bootstrap_interval(values)
    assert 0.2 < bounds[0, 0] < 0.5 < bounds[1, 0] < 0.8
    assert np.isnan(bounds[:, 1]).all(), "one problem says nothing about others"
    halves = np.array([[0.0], [np.nan], [1.0], [np.nan]] * 50)
    np.testing.assert_allclose(compute_bootstrap_interval(halves)[:, 0], [0.4, 0.6], atol=0.02)


def test_no_problems_no_interval() -> None:
    assert np.isnan(compute_bootstrap_interval(np.empty((0, 2)))).all()
    assert compute_bootstrap_interval(np.empty((3, 0))).shape == (2, 0)
