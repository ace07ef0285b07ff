"""Metrics of the log-prob mismatch between rollout engine and trainer in one iteration.

Trainer and engine have equal weights, so rho differs from 1 only by numerical error:
d = log pi_trainer - log pi_engine at each action token, rho = e^d.

    k1       mean of -d          estimate of KL(engine || trainer), can be negative
    k3       mean of e^d - d - 1 estimate of KL(engine || trainer), never negative
    abs      mean of |d|
    rho_*    quantiles of rho over tokens
    ess      effective sample size of the token weights rho, as a share of the tokens: (sum rho)^2 / (n sum rho^2)
    ess_sequence   ess with one weight per trajectory: the product of rho over its tokens
    k3_at_*  k3 by position in the response; growth with the position indicates a KV cache error
"""

from __future__ import annotations

import numpy as np

from alphaapollo.algorithms.masked import MAX_LOG_RATIO

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
"""First token of each bin of k3_at_*."""


def mismatch_metrics(
    trainer_logp: np.ndarray, engine_logp: np.ndarray, trajectory_ids: np.ndarray, positions: np.ndarray
) -> dict[str, float]:
    """Compute the metrics `mismatch/*` listed in this module's docstring; {} without action tokens.

    Args:
        trainer_logp, engine_logp: [n] log-probs of the action tokens, in any order.
        trajectory_ids: [n] trajectory of each token, 0 .. N-1.
        positions: [n] position of each token in the response of its row.
    """
    if not len(trainer_logp):
        return {}
    d = np.subtract(trainer_logp, engine_logp, dtype=np.float64)
    np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO, out=d)
    ratio_minus_one = np.expm1(d)
    k3 = ratio_minus_one - d
    metrics = {"k1": float(-d.mean()), "k3": float(k3.mean()), "abs": float(np.abs(d).mean())}
    nonempty = np.bincount(trajectory_ids) > 0
    products = np.bincount(trajectory_ids, weights=d)[nonempty]
    d.sort()  # order is not needed below, and numpy sorts faster than it computes quantiles
    ratios = np.exp(np.quantile(d, list(QUANTILES.values()), overwrite_input=True))
    metrics |= {f"rho_{name}": float(ratio) for name, ratio in zip(QUANTILES, ratios, strict=True)}
    ratio_minus_one += 1
    metrics |= {
        "ess": _effective_sample_share(ratio_minus_one),
        "ess_sequence": _effective_sample_share(np.exp(products - products.max())),
    }
    bins = (np.searchsorted(POSITIONS, np.arange(positions.max() + 1), side="right") - 1)[positions]
    counts, sums = np.bincount(bins), np.bincount(bins, weights=k3)
    metrics |= {f"k3_at_{POSITIONS[i]}": float(sums[i] / counts[i]) for i in np.flatnonzero(counts)}
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def _effective_sample_share(weights: np.ndarray) -> float:
    """Compute the effective sample size of n weights, divided by n: (sum w)^2 / (n sum w^2). [n] -> (0, 1]."""
    return float(weights.sum() ** 2 / (len(weights) * weights.dot(weights)))
