"""Test whether tokens are samples of the policy's distributions.

The surprise log p(token) + H(p) of a token sampled from p has mean 0 and variance Var(log p). The token repeats token t
of an earlier sample at this position with probability p(t). Sums of surprises, and of repetitions minus p(t), are thus
martingales, whatever ends a response. A martingale with steps x of variances v has sub-Gaussian tails on the scale
sqrt(sum(x^2 + 2 v) / 3), for any distributions (Delyon 2009, doi 10.1214/EJP.v14-593).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

NUM_SUMS = 4  # sum of x, squared scale, squared log-prob mismatches, and sum of v


def sum_surprises(stats: np.ndarray, engine_logp: np.ndarray) -> np.ndarray:
    """Return NUM_SUMS sums for the surprises of n tokens. stats [n, 3]: log p(token), H(p) and Var(log p). -> [4]"""
    logp, entropy, variance = stats.T.astype(np.float64)
    surprise, mismatch = logp + entropy, logp - engine_logp
    squared_scale = (surprise @ surprise + 2 * variance.sum()) / 3
    return np.array([surprise.sum(), squared_scale, mismatch @ mismatch, variance.sum()])


def sum_repetitions(samples: Sequence[tuple[Sequence[int], Sequence[float]]]) -> np.ndarray:
    """Return NUM_SUMS sums for how often a sample has the same token as the sample before it, up to and including the
    first different token. samples: token ids and log-probs of responses to one prompt. -> [4]"""
    sums, arrays = np.zeros(NUM_SUMS), [(np.asarray(ids), np.exp(logp)) for ids, logp in samples]
    for (earlier, p), (later, _) in pairwise(arrays):
        length = min(len(earlier), len(later))
        is_same = earlier[:length] == later[:length]
        count = length if is_same.all() else int(is_same.argmin()) + 1
        excess, variance = is_same[:count] - p[:count], p[:count] * (1 - p[:count])
        sums[:2] += excess.sum(), (excess @ excess + 2 * variance.sum()) / 3  # the other two sums stay 0
    return sums


def compute_z(sums: np.ndarray) -> float:
    """Return the sum of x in units of its scale, after subtracting what the log-prob mismatch of engine and trainer can
    explain: at most sqrt(sum of squared mismatches * sum of v), by the Cauchy-Schwarz inequality."""
    total, squared_scale, squared_mismatch, variance = sums
    unexplained = max(0.0, abs(total) - math.sqrt(squared_mismatch * variance))
    return math.copysign(unexplained / math.sqrt(squared_scale), total) if squared_scale > 0 else 0.0
