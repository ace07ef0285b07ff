"""Policy loss of one micro-batch, with KL and entropy terms.

The loss is a weighted sum over token sequences. The driver computes the weights for the complete mini-batch, so the sum
of all losses, and of their gradients, does not depend on micro-batches, ranks or packing:

    sum_i w_i sum_t m_it (rho_it * policy loss + penalty + kl_coef * KL - entropy_coef * entropy)

m: action mask. rho: weight or mask of algorithm.rollout_correction, or 1. Plug-ins of the policy worker add terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from alphaapollo.algorithms.aggregation import aggregate_sequence_losses, aggregate_token_losses
from alphaapollo.algorithms.kl import kl_penalty, unbiased_kl
from alphaapollo.algorithms.mismatch import off_policy_sequence_mask, rollout_correction_weights
from alphaapollo.algorithms.policy_losses import PolicyLoss, PolicyLossInputs
from alphaapollo.algorithms.statistics import JoinedTrajectories, apply_mask, row_mean
from alphaapollo.batching.batch import Columns, MiniBatch, RankBatch
from alphaapollo.config.schema import Actor, RolloutCorrection
from alphaapollo.models.lm_head import TokenStats
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.workers.loss_functions import UserLoss
from alphaapollo.workers.model_worker import MAX_SUFFIX, TokenParts


@dataclass(frozen=True, eq=False)
class TrainedRows:
    """Rows of one rank whose gradients are accumulated for an optimizer step, and the inputs of their loss."""

    batch: RankBatch
    mini_batch: MiniBatch
    loss: PolicyLoss | UserLoss
    columns: Columns[np.ndarray]  # inputs of a policy loss; old log-probs may be missing: use the forward pass's
    kl_coef: float | None = None  # coefficient of ppo_kl; None: the configured one
    needs_entropy: bool = False
    logprobs: TokenParts | None = None  # list to which the log-probs of the forward passes are appended
    errors: list[Exception] | None = None  # list to which errors of the loss are appended; None: they are raised


@dataclass(frozen=True, kw_only=True)
class ObjectiveInputs(PolicyLossInputs):
    """Inputs of the policy loss of a micro-batch, as matrices [rows, tokens of the longest response]."""

    entropy: Tensor | None = None
    divergence: Tensor | None = None  # from the distributions of a DivergenceTarget
    ref_logp: Tensor | None = None  # for a KL estimated from sampled tokens
    loss_weights: Tensor  # [b] weight of the sum over a row's tokens
    sequence_weights: Tensor  # [b] weight of a row in a sequence-level loss
    divergence_weights: Tensor  # [b] weight of the sum over a row's divergences
    token_weights: Tensor | None = None  # weight of each token in these sums; None: 1

    def sum_tokens(self, values: Tensor, row_weights: Tensor) -> Tensor:
        """Compute the weighted sum of values of tokens [b, L]."""
        values = values if self.token_weights is None else values * self.token_weights
        return aggregate_token_losses(values, self.mask, row_weights)


def build_objective_inputs(micro: MicroBatch, stats: TokenStats, kl_coef: float | None = None) -> ObjectiveInputs:
    """Build the inputs of the policy loss. Without old log-probs, they are those of this forward pass."""
    columns = micro.columns
    flat = {
        "logp": stats.logprobs,
        "entropy": stats.entropy,
        "divergence": stats.divergence,
        "old_logp": stats.logprobs.detach() if columns.old_logprobs is None else columns.old_logprobs,
        "ref_logp": columns.ref_logprobs,
        "rollout_logp": micro.rollout_logprobs,
        "advantages": columns.advantages,
        "token_weights": columns.token_weights,
        "selected_tokens": None if columns.selected_tokens is None else columns.selected_tokens.bool(),
    }
    matrices = {name: micro.to_matrix(column) for name, column in flat.items() if column is not None}
    mask, loss_weights, sequence_weights = micro.to_matrix(micro.mask), columns.loss_weights, columns.sequence_weights
    assert loss_weights is not None and sequence_weights is not None
    weights = {"loss_weights": loss_weights, "sequence_weights": sequence_weights}
    weights["divergence_weights"] = loss_weights if columns.divergence_weights is None else columns.divergence_weights
    if columns.trajectory_ids is not None:  # concatenate the rows of each trajectory
        joined = JoinedTrajectories.from_mask(mask, columns.trajectory_ids)
        matrices = {name: joined.join(matrix) for name, matrix in matrices.items()}
        mask = joined.mask
        weights = {name: joined.rows_by_trajectory.take_value_per_group(values) for name, values in weights.items()}
    return ObjectiveInputs(mask=mask, kl_coef=kl_coef, **weights, **matrices)


def compute_policy_objective(
    matrices: ObjectiveInputs, actor: Actor, policy_loss: PolicyLoss, correction: RolloutCorrection
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of a micro-batch and its metrics, which add up over micro-batches and ranks.

    Metrics that start with row_ are sums over rows with sampled tokens, or over trajectories for a trajectory-level
    loss. Metrics that end in _max are maxima. All other metrics except losses are sums over sampled tokens.
    """
    mask, weights = matrices.mask, matrices.loss_weights
    output = policy_loss(matrices, actor)
    factor, metrics = _compute_policy_loss_factor(matrices, correction)
    losses = output.loss
    if factor is not None:
        losses = losses * (factor if policy_loss.level == "token" else row_mean(factor, mask))
    losses = losses + output.penalty
    if policy_loss.level == "token":
        loss, prefix = matrices.sum_tokens(losses, weights), ""
    else:
        loss, prefix = aggregate_sequence_losses(losses, matrices.sequence_weights), "row_"
        metrics["rows"] = mask.bool().any(dim=1).sum()
    metrics |= {prefix + name: value for name, value in output.metrics.items()}
    ratios = matrices.log_ratio.detach().masked_fill(~mask.bool(), -math.inf)
    metrics |= {
        "pg_loss": loss,
        "ratio_max": ratios.max().exp(),  # 0 without action tokens
        "tokens": mask.sum(),
    }
    if matrices.entropy is not None:
        metrics["entropy"] = apply_mask(matrices.entropy, mask).sum()
    if actor.entropy_coeff > 0:
        assert matrices.entropy is not None
        loss = loss - actor.entropy_coeff * matrices.sum_tokens(matrices.entropy, weights)
    if actor.use_kl_loss:
        kl = _estimate_reference_kl(matrices, actor)
        loss = loss + actor.kl_loss_coef * matrices.sum_tokens(kl, weights)
        metrics["ref_kl"] = apply_mask(kl, mask).sum()
    metrics["loss"] = loss
    return loss, metrics


def _compute_policy_loss_factor(
    matrices: ObjectiveInputs, correction: RolloutCorrection
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Compute the factor rho [b, L] of the policy loss, without gradient (None: 1), and its metrics.

    With a sequence-level loss, rho is equal for all tokens of a trajectory.
    """
    if correction.method is None and correction.off_policy_mask_threshold is None:
        return None, {}
    mask, rollout_logp = matrices.mask, matrices.rollout_logp
    assert rollout_logp is not None
    factor, metrics = mask, {}
    if correction.method:
        factor = rollout_correction_weights(
            matrices.old_logp,
            rollout_logp,
            mask,
            method=correction.method,
            level=correction.level,
            low=correction.low,
            high=correction.high,
        )
        dropped = apply_mask((factor == 0).double(), mask).sum()
        metrics = {"correction_weight": factor.sum(), "correction_dropped": dropped}
    if (threshold := correction.off_policy_mask_threshold) is not None:
        keep_mask = off_policy_sequence_mask(matrices.logp, rollout_logp, matrices.advantages, mask, threshold)
        factor = factor * keep_mask
        metrics["off_policy_masked"] = mask.sum() - keep_mask.sum()
    return factor, metrics


def _estimate_reference_kl(matrices: ObjectiveInputs, actor: Actor) -> Tensor:
    """Compute or estimate KL(pi||ref) at each sampled token. [b, L]"""
    if actor.uses_full_kl:
        assert matrices.divergence is not None
        return matrices.divergence
    assert matrices.ref_logp is not None
    if actor.kl_loss_type == "unbiased":  # the engine sampled the tokens, whatever the old log-probs are
        assert matrices.rollout_logp is not None
        return unbiased_kl(matrices.logp, matrices.rollout_logp, matrices.ref_logp, matrices.mask)
    return kl_penalty(matrices.logp, matrices.ref_logp, actor.kl_loss_type)


def normalize_metrics(sums: dict[str, float], num_steps: int) -> dict[str, float]:
    """Convert sums over all ranks to means: losses per optimizer step, distillation metrics per distilled token, others
    per sampled token or row."""
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
        elif name.startswith("distill/"):
            metrics[name] = value / max(sums["distilled_tokens"], 1.0)
        elif name not in ("tokens", "rows", "distilled_tokens"):
            metrics[name] = value / tokens
    return metrics
