"""Test whether tokens are samples of the policy's distributions.

Given its context, a token that is sampled from p has a surprise log p(token) + H(p) of mean 0 and variance Var(log p),
and is the token of an earlier sample at this place with probability p(that token). The sums of both over tokens are
therefore martingales, whatever ends a response. A martingale with steps x of variances v has sub-Gaussian tails on the
scale sqrt(sum(x^2 + 2 v) / 3), for any distributions (Delyon 2009, doi 10.1214/EJP.v14-593).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

NUM_SUMS = 4


def sum_surprises(stats: np.ndarray, engine_logp: np.ndarray) -> np.ndarray:
    """Return sums over n tokens: surprises, their squared scale, squared log-prob mismatches, and variances. stats: log
    p(token), H(p) and Var(log p). [n, 3], [n] -> [4]"""
    logp, entropy, variance = stats.T.astype(np.float64)
    x, d = logp + entropy, logp - engine_logp
    return np.array([x.sum(), (x @ x + 2 * variance.sum()) / 3, d @ d, variance.sum()])


def sum_repetitions(samples: Sequence[tuple[Sequence[int], Sequence[float]]]) -> np.ndarray:
    """Return the sums of how often a sample repeats the one before it, up to the first other token. samples: token ids
    and log-probs of responses to one prompt. -> [4]"""
    sums, arrays = np.zeros(NUM_SUMS), [(np.asarray(ids), np.exp(logp)) for ids, logp in samples]
    for (earlier, p), (later, _) in pairwise(arrays):
        length = min(len(earlier), len(later))
        is_same = earlier[:length] == later[:length]
        seen = length if is_same.all() else int(is_same.argmin()) + 1
        x, variance = is_same[:seen] - p[:seen], p[:seen] * (1 - p[:seen])
        sums[:2] += x.sum(), (x @ x + 2 * variance.sum()) / 3
    return sums


def compute_z(sums: np.ndarray) -> float:
    """Return the sum in standard deviations, without what the log-prob mismatch of engine and trainer may explain: per
    token at most the root of its mean square times that of the variances (Cauchy-Schwarz)."""
    total, scale, squared_mismatch, variance = sums
    unexplained = max(0.0, abs(total) - math.sqrt(squared_mismatch * variance))
    return math.copysign(unexplained / math.sqrt(scale), total) if scale > 0 else 0.0
