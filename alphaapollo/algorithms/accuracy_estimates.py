"""Figures of an evaluation, a value for each problem: pass@k, majority votes, and intervals over problems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

RESAMPLES = 5000  # of the bootstrap: the bounds then stand at quantiles 0.025 and 0.975, give or take 0.002
CHUNK = 2**22  # drawn problems at a time


def pass_at_k(num_samples: np.ndarray, num_correct: np.ndarray, largest_k: int) -> np.ndarray:
    """The chance that at least one of k samples is correct, estimated without bias from n >= k samples.

    pass@k = 1 - C(n - c, k) / C(n, k) = 1 - product over j < k of (n - c - j) / (n - j)      (arXiv 2107.03374, Eq. 1)

    Args:
        num_samples: [P] samples of each problem (n).
        num_correct: [P] the correct ones among them (c).
        largest_k: K.

    Returns:
        [P, K]; column k - 1 is pass@k, NaN where a problem has fewer than k samples.
    """
    n, c, j = num_samples[:, None], num_correct[:, None], np.arange(largest_k)[None, :]
    wrong = np.maximum(n - c - j, 0) / np.maximum(n - j, 1)
    return np.where(j < n, 1 - np.cumprod(wrong, axis=1), np.nan)


def majority_accuracy(answers: Sequence[str | None], accuracies: Sequence[float]) -> float:
    """The accuracy of one problem's most frequent answer.

    Of answers that are equally frequent one is chosen at random, and this is its exact expectation: the mean over them.
    A sample without an answer (None) has no vote; where nobody votes the majority is wrong. Samples with one answer
    usually have one accuracy; where not, their mean counts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = {answer for answer, count in votes.items() if count == most}
    counted = [value for answer, value in zip(answers, accuracies, strict=True) if answer in leaders]
    return math.fsum(counted) / len(counted)  # leaders have equally many samples, so this is the mean of their means


def bootstrap_interval(
    values: np.ndarray, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> np.ndarray:
    """Percentile bootstrap of the mean over problems: problems are drawn anew, their samples stay. The order of the
    problems changes nothing: each figure's values are sorted first.

    Args:
        values: [P, F] each problem's value of each figure; NaN where it has none, and then it does not count.
        seed: of the draws; all figures see the same ones.

    Returns:
        [2, F] lower and upper bound; NaN for figures that fewer than two problems have.
    """
    num_problems, num_figures = values.shape
    values = np.sort(values, axis=0)
    known = ~np.isnan(values)
    if num_problems == 0 or num_figures == 0:
        return np.full((2, num_figures), np.nan)
    filled, generator = np.where(known, values, 0.0), np.random.default_rng(seed)
    means = np.empty((resamples, num_figures))
    size = max(1, CHUNK // num_problems)
    for start in range(0, resamples, size):
        rows = min(size, resamples - start)
        draws = generator.integers(num_problems, size=(rows, num_problems)) + num_problems * np.arange(rows)[:, None]
        counts = np.bincount(draws.ravel(), minlength=rows * num_problems).reshape(rows, num_problems).astype(float)
        with np.errstate(invalid="ignore"):  # a resample may hold no problem that has the figure
            means[start : start + rows] = (counts @ filled) / (counts @ known)
    enough = known.sum(axis=0) >= 2
    bounds = np.full((2, num_figures), np.nan)
    tail = (1 - level) / 2
    bounds[:, enough] = np.nanquantile(means[:, enough], [tail, 1 - tail], axis=0)
    return bounds
