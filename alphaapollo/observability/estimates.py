"""Statistics of an evaluation: pass@k per problem, and confidence intervals over problems."""

from __future__ import annotations

import numpy as np

RESAMPLES = 5000  # number of bootstrap resamples; the quantile levels are then accurate to about 0.002
CHUNK = 2**22  # number of problems drawn per numpy call; bounds memory


def pass_at_k(num_samples: np.ndarray, num_correct: np.ndarray, largest_k: int) -> np.ndarray:
    """Estimate pass@k of each problem without bias: the probability that at least one of k samples is correct.

    pass@k = 1 - C(n - c, k) / C(n, k) = 1 - product over j < k of (n - c - j) / (n - j)      (arXiv 2107.03374, Eq. 1)

    num_samples, num_correct: [P] n and c. Returns [P, K] for K = largest_k; column k - 1 is pass@k, NaN where n < k.
    """
    n, c, j = num_samples[:, None], num_correct[:, None], np.arange(largest_k)[None, :]
    wrong = np.maximum(n - c - j, 0) / np.maximum(n - j, 1)
    return np.where(j < n, 1 - np.cumprod(wrong, axis=1), np.nan)


def compute_bootstrap_interval(
    values: np.ndarray, seed: int = 0, level: float = 0.95, resamples: int = RESAMPLES
) -> np.ndarray:
    """Compute percentile bootstrap intervals of the mean of F metrics over P problems.

    Only problems are resampled, not their samples; all metrics use the same resamples. The values of each metric are
    sorted first, so that the order of the problems does not matter.

    values: [P, F]; NaN is ignored. Returns [2, F] lower and upper bound; NaN for metrics with fewer than two problems.
    """
    num_problems, num_metrics = values.shape
    values = np.sort(values, axis=0)
    has_value = ~np.isnan(values)
    if num_problems == 0 or num_metrics == 0:
        return np.full((2, num_metrics), np.nan)
    filled, generator = np.where(has_value, values, 0.0), np.random.default_rng(seed)
    means = np.empty((resamples, num_metrics))
    size = max(1, CHUNK // num_problems)
    for start in range(0, resamples, size):
        rows = min(size, resamples - start)
        draws = generator.integers(num_problems, size=(rows, num_problems)) + num_problems * np.arange(rows)[:, None]
        counts = np.bincount(draws.ravel(), minlength=rows * num_problems).reshape(rows, num_problems).astype(float)
        with np.errstate(invalid="ignore"):  # a resample may have no value of a metric
            means[start : start + rows] = (counts @ filled) / (counts @ has_value)
    has_interval = has_value.sum(axis=0) >= 2
    bounds = np.full((2, num_metrics), np.nan)
    tail = (1 - level) / 2
    bounds[:, has_interval] = np.nanquantile(means[:, has_interval], [tail, 1 - tail], axis=0)
    return bounds
