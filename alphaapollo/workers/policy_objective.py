"""Policy loss of one micro-batch. Its gradients add up over micro-batches and ranks.

It is a sum over rows with row weights that the driver has fixed for the mini-batch, so micro-batches, ranks and packing
do not change the result:

    sum_i w_i sum_t m_it (rho_it * policy loss + kl_coef * KL + teacher's coef * D - entropy_coef * entropy)

rho is 1, or the importance-sampling correction of algorithm.rollout_correction, for the policy term only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from alphaapollo.algorithms.aggregation import aggregate, aggregate_sequences
from alphaapollo.algorithms.correction import mismatch_weights
from alphaapollo.algorithms.joined_trajectories import JoinedTrajectories
from alphaapollo.algorithms.kl import kl_penalty
from alphaapollo.algorithms.masked import log_ratio, masked, row_mean
from alphaapollo.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from alphaapollo.config.schema import NO_TEACHER, Actor, RolloutCorrection, Teacher
from alphaapollo.models.lm_head import TokenStats
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.workers.metric_sums import MAX_SUFFIX


@dataclass(frozen=True)
class PolicyMatrices:
    """Response-aligned matrices [b, L] of a micro-batch. `logp`, `entropy` and `divergence` have gradients."""

    logp: Tensor
    entropy: Tensor
    divergence: Tensor | None  # from the distributions of the teacher, or of the reference for a KL of kind full
    old_logp: Tensor
    ref_logp: Tensor | None  # for a KL of another kind
    rollout_logp: Tensor
    advantages: Tensor
    mask: Tensor  # 1 on action tokens
    loss_weights: Tensor  # [b] weight of the sum over a row's tokens
    sequence_weights: Tensor  # [b] weight of a row in a sequence-level loss
    chosen: Tensor | None = None  # bool, tokens that the loss treats separately


def policy_matrices(micro: MicroBatch, stats: TokenStats, old_logprobs: Tensor | None = None) -> PolicyMatrices:
    """Build the matrices. Rows of one trajectory are concatenated.

    Args:
        old_logprobs: [n], replaces the column of the micro-batch.
    """
    columns = micro.columns
    old = columns.old_logprobs if old_logprobs is None else old_logprobs
    assert stats.entropy is not None and columns.advantages is not None and old is not None
    assert columns.loss_weights is not None and columns.sequence_weights is not None
    matrices = PolicyMatrices(
        logp=micro.to_matrix(stats.logprobs),
        entropy=micro.to_matrix(stats.entropy),
        divergence=None if stats.divergence is None else micro.to_matrix(stats.divergence),
        old_logp=micro.to_matrix(old),
        ref_logp=None if columns.ref_logprobs is None else micro.to_matrix(columns.ref_logprobs),
        rollout_logp=micro.to_matrix(micro.rollout_logprobs),
        advantages=micro.to_matrix(columns.advantages),
        mask=micro.to_matrix(micro.mask),
        loss_weights=columns.loss_weights,
        sequence_weights=columns.sequence_weights,
        chosen=None if columns.chosen is None else micro.to_matrix(columns.chosen).bool(),
    )
    return matrices if columns.trajectory_ids is None else _join_trajectories(matrices, columns.trajectory_ids)


def _join_trajectories(matrices: PolicyMatrices, trajectory_ids: Tensor) -> PolicyMatrices:
    """Concatenate the rows of each trajectory. trajectory_ids [b]"""
    joined = JoinedTrajectories.of(matrices.mask, trajectory_ids)
    per_token = ("logp", "entropy", "divergence", "old_logp", "ref_logp", "rollout_logp", "advantages", "chosen")
    values: dict[str, Any] = {name: value for name in per_token if (value := getattr(matrices, name)) is not None}
    return replace(
        matrices,
        mask=joined.mask,
        loss_weights=joined.rows.first(matrices.loss_weights),
        sequence_weights=joined.rows.first(matrices.sequence_weights),
        **{name: joined.join(value) for name, value in values.items()},
    )


def policy_objective(
    matrices: PolicyMatrices,
    actor: Actor,
    policy_loss: PolicyLoss,
    correction: RolloutCorrection,
    teacher: Teacher = NO_TEACHER,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss and its metrics.

    `loss` and `pg_loss` add up over micro-batches and ranks. Names that start with row_ are sums over non-empty rows
    (trajectories, for a trajectory-level loss), names that end in _max are maxima, all others are sums over action
    tokens.
    """
    mask, weights = matrices.mask, matrices.loss_weights
    inputs = PolicyLossInputs(
        logp=matrices.logp,
        old_logp=matrices.old_logp,
        advantages=matrices.advantages,
        mask=mask,
        rollout_logp=matrices.rollout_logp,
        chosen=matrices.chosen,
    )
    output = policy_loss(inputs, actor)
    losses, metrics = output.loss, {}
    if correction.method:
        rho = _correction_weights(matrices, correction)
        losses = losses * (rho if policy_loss.level == "token" else row_mean(rho, mask))
        metrics = {"correction_weight": rho.sum(), "correction_dropped": masked((rho == 0).double(), mask).sum()}
    if policy_loss.level == "token":
        loss, prefix = aggregate(losses, mask, weights), ""
    else:
        loss, prefix = aggregate_sequences(losses, matrices.sequence_weights), "row_"
        metrics["rows"] = mask.bool().any(dim=1).sum()
    metrics |= {prefix + name: value for name, value in output.metrics.items()}
    metrics |= {
        "pg_loss": loss,
        "ratio_max": _largest_ratio(matrices),
        "entropy": masked(matrices.entropy, mask).sum(),
        "tokens": mask.sum(),
    }
    if actor.entropy_coeff > 0:
        loss = loss - actor.entropy_coeff * aggregate(matrices.entropy, mask, weights)
    if actor.use_kl_loss:
        kl = _kl(matrices, actor)
        loss = loss + actor.kl_loss_coef * aggregate(kl, mask, weights)
        metrics["ref_kl"] = masked(kl, mask).sum()
    if teacher.whole:
        assert matrices.divergence is not None
        loss = loss + teacher.coef * aggregate(matrices.divergence, mask, weights)
    metrics["loss"] = loss
    return loss, metrics


def _largest_ratio(matrices: PolicyMatrices) -> Tensor:
    """Largest probability ratio of action tokens; 0 without action tokens."""
    d = log_ratio(matrices.logp.detach(), matrices.old_logp, matrices.mask)
    return d.masked_fill(~matrices.mask.bool(), -math.inf).max().exp()


def _correction_weights(matrices: PolicyMatrices, correction: RolloutCorrection) -> Tensor:
    """Importance-sampling weights [b, L], constants, zero off the mask. At sequence and geometric level all tokens of a
    trajectory have the same weight."""
    assert correction.method is not None
    return mismatch_weights(
        matrices.old_logp,
        matrices.rollout_logp,
        matrices.mask,
        method=correction.method,
        level=correction.level,
        low=correction.low,
        high=correction.high,
    )


def _kl(matrices: PolicyMatrices, actor: Actor) -> Tensor:
    if actor.full_kl:
        assert matrices.divergence is not None
        return matrices.divergence
    assert matrices.ref_logp is not None
    return kl_penalty(matrices.logp, matrices.ref_logp, actor.kl_loss_type)


def normalize(sums: dict[str, float], num_steps: int) -> dict[str, float]:
    """Turn sums over everything into means: losses per optimizer step, others per token or row. Without tokens only the
    losses are returned."""
    tokens, rows = sums["tokens"], sums.get("rows", 0.0)
    if not tokens:
        return {name: sums[name] / num_steps for name in ("loss", "pg_loss")}
    metrics = {}
    for name, value in sums.items():
        if name in ("loss", "pg_loss"):
            metrics[name] = value / num_steps
        elif name.endswith(MAX_SUFFIX):
            metrics[name] = value
        elif name.startswith("row_"):
            metrics[name.removeprefix("row_")] = value / max(rows, 1.0)
        elif name not in ("tokens", "rows"):
            metrics[name] = value / tokens
    return metrics
