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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alphaapollo.algorithms.masked import MAX_LOG_RATIO

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
"""First token of each bin of k3_at_*."""


@dataclass(frozen=True)
class MismatchSums:
    """Sums over the action tokens of one rank, from which `mismatch_metrics` computes the metrics of all ranks."""

    log_ratios: np.ndarray  # float32 [n] d of each token
    moments: np.ndarray  # float64 [5] sums of d, |d|, e^d - d - 1, e^d, e^2d
    trajectory_ids: np.ndarray  # int64 [r] trajectories with tokens on this rank
    trajectory_sums: np.ndarray  # float64 [r] sum of d over the tokens of each
    position_counts: np.ndarray  # int64 [len(POSITIONS)] tokens in each bin
    position_sums: np.ndarray  # float64 [len(POSITIONS)] sum of e^d - d - 1 over the tokens of each bin


def sum_mismatch(
    trainer_logp: np.ndarray, engine_logp: np.ndarray, trajectory_ids: np.ndarray, positions: np.ndarray
) -> MismatchSums:
    """Compute the sums of one rank.

    Args:
        trainer_logp, engine_logp: [n] log-probs of the action tokens, in any order.
        trajectory_ids: [n] trajectory of each token.
        positions: [n] position of each token in the response of its row.
    """
    d = np.subtract(trainer_logp, engine_logp, dtype=np.float64).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_minus_one = np.expm1(d)
    k3, ratio = ratio_minus_one - d, ratio_minus_one + 1
    ids, index = np.unique(trajectory_ids, return_inverse=True)
    bins, count = np.searchsorted(POSITIONS, positions, side="right") - 1, len(POSITIONS)
    return MismatchSums(
        d.astype(np.float32),
        np.array([d.sum(), np.abs(d).sum(), k3.sum(), ratio.sum(), ratio.dot(ratio)]),
        ids,
        np.bincount(index, weights=d, minlength=len(ids)),
        np.bincount(bins, minlength=count),
        np.bincount(bins, weights=k3, minlength=count),
    )


def mismatch_metrics(ranks: Sequence[MismatchSums]) -> dict[str, float]:
    """Compute the metrics `mismatch/*` listed in this module's docstring; {} without action tokens."""
    log_ratios = np.concatenate([rank.log_ratios for rank in ranks])
    if not len(log_ratios):
        return {}
    d, abs_d, k3, ratio, ratio_squared = np.sum([rank.moments for rank in ranks], axis=0) / len(log_ratios)
    ids, index = np.unique(np.concatenate([rank.trajectory_ids for rank in ranks]), return_inverse=True)
    products = np.bincount(index, weights=np.concatenate([rank.trajectory_sums for rank in ranks]))
    weights = np.exp(products - products.max())
    quantiles = np.quantile(log_ratios, list(QUANTILES.values()), overwrite_input=True)
    counts = np.sum([rank.position_counts for rank in ranks], axis=0)
    sums = np.sum([rank.position_sums for rank in ranks], axis=0)
    metrics = {
        "k1": -d,
        "k3": k3,
        "abs": abs_d,
        **dict(zip((f"rho_{name}" for name in QUANTILES), np.exp(quantiles), strict=True)),
        "ess": ratio**2 / ratio_squared,
        "ess_sequence": weights.sum() ** 2 / (len(ids) * weights.dot(weights)),
        **{f"k3_at_{POSITIONS[bin]}": sums[bin] / counts[bin] for bin in np.flatnonzero(counts)},
    }
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}
