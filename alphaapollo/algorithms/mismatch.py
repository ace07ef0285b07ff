"""How far the engine that sampled is from the trainer that learns, in one iteration's numbers.

With d = log pi_trainer - log pi_engine at each action token and rho = e^d (both under the same weights, so rho is 1 but
for arithmetic):

    k1       mean of -d          estimate of KL(engine || trainer), can be negative
    k3       mean of e^d - d - 1 the same, never negative
    abs      mean of |d|
    rho_*    quantiles of rho over tokens
    ess      effective sample size of the token weights rho, as a share of the tokens: (sum rho)^2 / (n sum rho^2)
    ess_sequence   the same of each trajectory's product
    k3_at_*  k3 of the tokens at those positions of the response: a gap that grows with the position is a cache's
"""

from __future__ import annotations

import numpy as np

from alphaapollo.algorithms.log_ratio import MAX_LOG_RATIO

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
"""Where the bins of positions begin."""


def mismatch_metrics(
    trainer_logp: np.ndarray, engine_logp: np.ndarray, mask: np.ndarray, trajectory_ids: np.ndarray
) -> dict[str, float]:
    """The figures above under `mismatch/`; {} where there is no action token. Matrices are [B, L], response-aligned,
    trajectory_ids int64 [B], 0 .. N-1."""
    is_action = mask.astype(bool)
    if not is_action.any():
        return {}
    d = trainer_logp[is_action].astype(np.float64) - engine_logp[is_action]
    d = d.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    gap = np.zeros(mask.shape)
    gap[is_action] = d
    k3 = np.expm1(d) - d
    metrics = {"k1": float(-d.mean()), "k3": float(k3.mean()), "abs": float(np.abs(d).mean())}
    ratios = np.exp(np.quantile(d, list(QUANTILES.values())))
    metrics |= {f"rho_{name}": float(ratio) for name, ratio in zip(QUANTILES, ratios, strict=True)}
    products = np.bincount(trajectory_ids, weights=gap.sum(axis=1))
    nonempty = np.bincount(trajectory_ids, weights=is_action.any(axis=1)) > 0
    metrics |= {"ess": _effective_share(d), "ess_sequence": _effective_share(products[nonempty])}
    k3_at = gap  # its memory: from here k3 where the tokens are
    k3_at[is_action] = k3
    for start, end in zip(POSITIONS, (*POSITIONS[1:], mask.shape[1]), strict=True):
        inside = is_action[:, start:end]
        if inside.any():
            metrics[f"k3_at_{start}"] = float(k3_at[:, start:end][inside].mean())
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def _effective_share(log_weights: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2) of weights e^x. [n] -> share in (0, 1]."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
