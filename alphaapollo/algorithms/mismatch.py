"""Log-prob mismatch of rollout engine and trainer: metrics of one iteration, and importance weights that correct it.

d = log pi_trainer - log pi_engine at each action token, rho = e^d. docs/algorithms/loss_parts.md explains the metrics
and the weights of algorithm.rollout_correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from alphaapollo.algorithms.statistics import MAX_LOG_RATIO, apply_mask, clamp_log_ratio, row_mean
from alphaapollo.config.schema import RolloutCorrection

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
"""First position of each bin of the metrics k3_at_*."""


@dataclass(frozen=True)
class MismatchSums:
    """Sums over the action tokens of one rank, from which `mismatch_metrics` computes the metrics of all ranks."""

    log_ratios: np.ndarray  # float32 [n] d of each token
    moments: np.ndarray  # float64 [5] sums of d, |d|, e^d - d - 1, e^d, e^2d
    trajectory_ids: np.ndarray  # int64 [r] trajectories with tokens on this rank
    trajectory_sums: np.ndarray  # float64 [r] sum of d over the tokens of each trajectory
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
    bins, num_bins = np.searchsorted(POSITIONS, positions, side="right") - 1, len(POSITIONS)
    return MismatchSums(
        d.astype(np.float32),
        np.array([d.sum(), np.abs(d).sum(), k3.sum(), ratio.sum(), ratio.dot(ratio)]),
        ids,
        np.bincount(index, weights=d, minlength=len(ids)),
        np.bincount(bins, minlength=num_bins),
        np.bincount(bins, weights=k3, minlength=num_bins),
    )


def mismatch_metrics(ranks: Sequence[MismatchSums]) -> dict[str, float]:
    """Compute the metrics `mismatch/*`; {} without action tokens."""
    log_ratios = np.concatenate([rank.log_ratios for rank in ranks])
    if not len(log_ratios):
        return {}
    d, abs_d, k3, ratio, ratio_squared = np.sum([rank.moments for rank in ranks], axis=0) / len(log_ratios)
    ids, index = np.unique(np.concatenate([rank.trajectory_ids for rank in ranks]), return_inverse=True)
    log_products = np.bincount(index, weights=np.concatenate([rank.trajectory_sums for rank in ranks]))
    products = np.exp(log_products - log_products.max())  # product of each trajectory's ratios, up to a common factor
    quantiles = np.quantile(log_ratios, list(QUANTILES.values()), overwrite_input=True)
    counts = np.sum([rank.position_counts for rank in ranks], axis=0)
    sums = np.sum([rank.position_sums for rank in ranks], axis=0)
    metrics = {
        "k1": -d,
        "k3": k3,
        "abs": abs_d,
        **dict(zip((f"rho_{name}" for name in QUANTILES), np.exp(quantiles), strict=True)),
        "ess": ratio**2 / ratio_squared,
        "ess_sequence": products.sum() ** 2 / (len(ids) * products.dot(products)),
        **{f"k3_at_{POSITIONS[bin]}": sums[bin] / counts[bin] for bin in np.flatnonzero(counts)},
    }
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}


Level = Literal["token", "sequence", "geometric"]
Method = Literal["tis", "mask"]


def rollout_correction_weights(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    method: Method = "tis",
    level: Level = "token",
    low: float | None = None,
    high: float | None = 2.0,
) -> Tensor:
    """Compute the importance weights rho of action tokens; 0 outside the mask. [B, L] each -> [B, L].

    Args:
        method: tis truncates rho to [low, high]; mask sets rho outside [low, high] to 0.
        level: rho is a token's ratio (token), or its row's product (sequence) or geometric mean (geometric) of ratios.
    """
    d = apply_mask(train_logp.detach() - rollout_logp.detach(), mask)
    if level == "sequence":
        d = d.sum(dim=1, keepdim=True).expand_as(d)
    elif level == "geometric":
        d = row_mean(d, mask).unsqueeze(1).expand_as(d)
    rho = clamp_log_ratio(d).exp()
    low = 0.0 if low is None else low
    high = math.inf if high is None else high
    weights = rho.clamp(low, high) if method == "tis" else apply_mask(rho, (rho >= low) & (rho <= high))
    return apply_mask(weights, mask)


def off_policy_sequence_mask(
    logp: Tensor, rollout_logp: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return 1 on tokens to train on, 0 on dropped tokens and outside the mask (arXiv 2512.02556, Eq. 9). [B, L] each.

    A token is dropped if its advantage is negative, and the mean of log(mu/pi) over the row's tokens exceeds the
    threshold, in nats. pi: trained policy. mu: rollout engine.
    """
    divergence = row_mean(rollout_logp - logp.detach(), mask)
    dropped = (advantages < 0) & (divergence > threshold).unsqueeze(1)
    return apply_mask((~dropped).to(logp.dtype), mask)


def needs_full_sequence(correction: RolloutCorrection) -> bool:
    """Return whether a token's weight depends on its whole trajectory, which must then be in one micro-batch."""
    has_sequence_weight = correction.method is not None and correction.level != "token"
    return has_sequence_weight or correction.off_policy_mask_threshold is not None
