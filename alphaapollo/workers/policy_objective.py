"""The loss of one micro-batch of the policy, as a number whose gradient adds up.

Every term is a sum over rows with the row weights that the driver fixed for the whole mini-batch, so micro-batches,
ranks and packing cannot change it:

    sum_i w_i sum_t m_it (rho_it * policy loss + kl_coef * KL + teacher's coef * D - entropy_coef * entropy)

rho is 1, or what algorithm.rollout_correction says: it corrects the policy term alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from alphaapollo.algorithms.aggregation import aggregate, aggregate_sequences
from alphaapollo.algorithms.correction import mismatch_weights
from alphaapollo.algorithms.end_to_end import EndToEnd
from alphaapollo.algorithms.kl import kl_penalty
from alphaapollo.algorithms.log_ratio import log_ratio
from alphaapollo.algorithms.masked import masked, row_mean
from alphaapollo.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from alphaapollo.config.schema import NO_TEACHER, Actor, RolloutCorrection, Teacher
from alphaapollo.models.lm_head import TokenStats
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.workers.process_group import LARGEST


@dataclass(frozen=True)
class PolicyMatrices:
    """A micro-batch of b rows, response-aligned [b, L]. `logp`, `entropy` and `divergence` have gradients."""

    logp: Tensor
    entropy: Tensor
    divergence: Tensor | None  # where whole distributions are compared: with the teacher's, or a KL of kind full
    old_logp: Tensor
    ref_logp: Tensor | None  # where the loss has a KL of another kind
    rollout_logp: Tensor
    advantages: Tensor
    mask: Tensor  # 1 on action tokens
    loss_weights: Tensor  # [b] weight of each row's token sum
    sequence_weights: Tensor  # [b] weight of each row in a sequence-level loss
    chosen: Tensor | None = None  # bool, where the loss treats some tokens apart


def policy_matrices(micro: MicroBatch, stats: TokenStats, old_logprobs: Tensor | None = None) -> PolicyMatrices:
    """Rows of one trajectory become one, laid end to end. old_logprobs [n]: instead of the micro-batch's column."""
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
    return matrices if columns.trajectory_ids is None else _end_to_end(matrices, columns.trajectory_ids)


def _end_to_end(matrices: PolicyMatrices, trajectory_ids: Tensor) -> PolicyMatrices:
    """A row a trajectory. trajectory_ids [b]"""
    whole = EndToEnd.of(matrices.mask, trajectory_ids)

    def join(values: Tensor | None) -> Tensor | None:
        return None if values is None else whole.join(values)

    return replace(
        matrices,
        logp=whole.join(matrices.logp),
        entropy=whole.join(matrices.entropy),
        divergence=join(matrices.divergence),
        old_logp=whole.join(matrices.old_logp),
        ref_logp=join(matrices.ref_logp),
        rollout_logp=whole.join(matrices.rollout_logp),
        advantages=whole.join(matrices.advantages),
        mask=whole.mask,
        loss_weights=whole.per_trajectory(matrices.loss_weights),
        sequence_weights=whole.per_trajectory(matrices.sequence_weights),
        chosen=join(matrices.chosen),
    )


def policy_objective(
    matrices: PolicyMatrices,
    actor: Actor,
    policy_loss: PolicyLoss,
    correction: RolloutCorrection,
    teacher: Teacher = NO_TEACHER,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its figures: `loss` and `pg_loss` add up over micro-batches, ranks and nothing else; the others are
    sums over action tokens, those that start with row_ over non-empty rows (trajectories, with such a loss), and those
    that end in _max the largest."""
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
    losses, figures = output.loss, {}
    if correction.method:
        rho = _correction_weights(matrices, correction)
        losses = losses * (rho if policy_loss.level == "token" else row_mean(rho, mask))
        figures = {"correction_weight": rho.sum(), "correction_dropped": masked((rho == 0).double(), mask).sum()}
    if policy_loss.level == "token":
        loss, prefix = aggregate(losses, mask, weights), ""
    else:
        loss, prefix = aggregate_sequences(losses, matrices.sequence_weights), "row_"
        figures["rows"] = mask.bool().any(dim=1).sum()
    figures |= {prefix + name: value for name, value in output.metrics.items()}
    figures |= {
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
        figures["ref_kl"] = masked(kl, mask).sum()
    if teacher.whole:
        assert matrices.divergence is not None
        loss = loss + teacher.coef * aggregate(matrices.divergence, mask, weights)
    figures["loss"] = loss
    return loss, figures


def _largest_ratio(matrices: PolicyMatrices) -> Tensor:
    """Of the action tokens alone; 0 where there is none."""
    d = log_ratio(matrices.logp.detach(), matrices.old_logp, matrices.mask)
    return d.masked_fill(~matrices.mask.bool(), -math.inf).max().exp()


def _correction_weights(matrices: PolicyMatrices, correction: RolloutCorrection) -> Tensor:
    """[b, L], constants, zero off the mask. At sequence and geometric level a trajectory's tokens share theirs."""
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


def normalise(sums: dict[str, float], num_steps: int) -> dict[str, float]:
    """Figures summed over everything -> means: losses by optimizer step, the others by token or row. The losses alone
    where no token was computed."""
    tokens, rows = sums["tokens"], sums.get("rows", 0.0)
    if not tokens:
        return {name: sums[name] / num_steps for name in ("loss", "pg_loss")}
    figures = {}
    for name, value in sums.items():
        if name in ("loss", "pg_loss"):
            figures[name] = value / num_steps
        elif name.endswith(LARGEST):
            figures[name] = value
        elif name.startswith("row_"):
            figures[name.removeprefix("row_")] = value / max(rows, 1.0)
        elif name not in ("tokens", "rows"):
            figures[name] = value / tokens
    return figures
