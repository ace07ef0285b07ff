"""Compute advantages and returns on the driver, from rewards and from the log-probs and values of the workers.

token rewards -> KL in the reward -> advantage estimator -> add the teacher's advantages -> split by training rank
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import AdvantageInputs, Advantages, Turns, get_estimator
from alphaapollo.algorithms.advantages.none import NO_ESTIMATOR
from alphaapollo.algorithms.divergence import compute_teacher_advantages
from alphaapollo.algorithms.kl import subtract_kl
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import Actor, Algorithm, Config, Teacher
from alphaapollo.data.batch import Columns
from alphaapollo.trainer.metrics import compute_advantage_metrics, compute_mean_length_penalty
from alphaapollo.trainer.step.training_batch import Batch, get_invalid_action_penalty, sum_rewards_per_trajectory
from alphaapollo.types import Trajectory, Turn

ColumnDtype = Literal["float32", "float64"]
COLUMN_NAMES = {
    "old_logprobs": "log-probs of the policy",
    "ref_logprobs": "log-probs of the reference",
    "values": "values of the critic",
    "teacher_logprobs": "log-probs of the teacher",
}


@dataclass(frozen=True)
class WorkerOutputs:
    """Log-probs and values that the workers computed, as matrices [B, L]. None: not needed."""

    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None

    def describe_non_finite(self, mask: Tensor) -> str:
        """Name the matrices with NaN or infinite values on action tokens; "" if there are none.

        mask: [B, L], 1 on action tokens (tokens that the model sampled).
        """
        found = []
        for name, words in COLUMN_NAMES.items():
            matrix = getattr(self, name)
            if matrix is not None and not np.isfinite(matrix.sum(dtype=np.float64)):
                bad = (~np.isfinite(matrix) & mask.bool().numpy()).any(axis=1)
                found += [f"the {words} are NaN or infinite in {bad.sum()} of {len(bad)} rows"] if bad.any() else []
        return "; ".join(found)


@dataclass(frozen=True)
class AssignedCredit:
    """Advantages and other inputs of the loss, split by training rank."""

    columns: list[Columns[np.ndarray]]  # one set of columns per rank
    has_gradient: np.ndarray  # bool [B], rows of trajectories that have a loss weight and a non-zero advantage
    metrics: dict[str, float]


def assign_credit(
    batch: Batch, computed: WorkerOutputs, config: Config, kl_coef: float = 0.0, dtype: ColumnDtype = "float32"
) -> AssignedCredit:
    """Compute advantages and returns of a batch of B sequences, and split them by training rank.

    kl_coef: coefficient of the KL penalty in the reward. dtype: of the computed columns.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    rewards, metrics = _add_kl_penalty(batch, computed, algorithm, kl_coef)
    result, returns = _estimate_advantages(batch, computed, rewards, algorithm)
    result, teacher_metrics = _add_teacher_advantages(result, batch, computed, config.teacher)
    has_advantage = np.asarray(result.advantages.numpy().any(axis=1))  # zero outside the mask
    metrics |= teacher_metrics | {"critic/rewards/mean": float(returns.mean())}
    if algorithm.adv_estimator != NO_ESTIMATOR or config.teacher.uses_sampled_tokens:
        metrics |= compute_advantage_metrics(result.advantages, batch.mask, has_advantage)
    if algorithm.overlong_penalty.enable or algorithm.length_budget.mode:
        shaped = batch.joined.join(batch.token_rewards).sum(-1)
        metrics["reward/length_penalty"] = compute_mean_length_penalty(
            batch.trajectories, shaped, get_invalid_action_penalty(actor)
        )
    columns = _pack_columns(batch, computed, result, actor, np.dtype(dtype))
    owners, has_weight = batch.trajectory_ids.numpy(), (batch.loss_weights != 0) | (batch.sequence_weights != 0)
    return AssignedCredit(columns, np.isin(owners, owners[has_advantage & has_weight]), metrics)


def _add_kl_penalty(
    batch: Batch, computed: WorkerOutputs, algorithm: Algorithm, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """Subtract the KL penalty from the token rewards [B, L] if algorithm.use_kl_in_reward. Also returns metrics."""
    if not algorithm.use_kl_in_reward:
        return batch.token_rewards, {}
    assert computed.old_logprobs is not None and computed.ref_logprobs is not None
    trajectories = batch.joined
    old, ref = (
        trajectories.join(_to_float64_tensor(column)) for column in (computed.old_logprobs, computed.ref_logprobs)
    )
    joined = trajectories.join(batch.token_rewards)
    shaped = subtract_kl(joined, old, ref, trajectories.mask, kl_coef, algorithm.kl_penalty)
    return trajectories.split(shaped.token_rewards), {
        "actor/reward_kl_penalty_coeff": kl_coef,
        "actor/reward_kl_penalty_per_sequence": float(shaped.kl_per_sequence),
        "actor/reward_kl_penalty": float(shaped.kl_per_token),
    }


def _estimate_advantages(
    batch: Batch, computed: WorkerOutputs, rewards: Tensor, algorithm: Algorithm
) -> tuple[Advantages, Tensor]:
    """Return the estimator's advantages and returns [B, L], and the total reward of each trajectory [N]."""
    estimator = get_estimator(algorithm.adv_estimator)
    returns = sum_rewards_per_trajectory(rewards, batch.trajectory_ids)
    needs_turns = "turns" in estimator.needs
    inputs = AdvantageInputs(
        token_rewards=rewards,
        mask=batch.mask,
        scores=returns[batch.trajectory_ids],
        group_ids=batch.group_ids,
        trajectory_ids=batch.trajectory_ids,
        values=None if computed.values is None else _to_float64_tensor(computed.values),
        components=batch.components,
        greedy_rewards=batch.greedy_rewards,
        turns=assign_turn_numbers(batch.trajectories, batch.group_ids, batch.mask) if needs_turns else None,
        mini_batches=batch.mini_batch_ids if "mini_batches" in estimator.needs else None,
    )
    return estimator(inputs, algorithm), returns


def _add_teacher_advantages(
    advantages: Advantages, batch: Batch, computed: WorkerOutputs, teacher: Teacher
) -> tuple[Advantages, dict[str, float]]:
    """Add the distillation advantages (from teacher and policy log-probs) if teacher.divergence=sampled."""
    if not teacher.uses_sampled_tokens:
        return advantages, {}
    assert computed.old_logprobs is not None and computed.teacher_logprobs is not None
    logps = _to_float64_tensor(computed.old_logprobs), _to_float64_tensor(computed.teacher_logprobs)
    taught = compute_teacher_advantages(*logps, batch.mask)
    combined = replace(advantages, advantages=advantages.advantages + teacher.coef * taught.advantages)
    return combined, {"distill/reverse_kl": taught.reverse_kl, "distill/agreement": taught.agreement}


def _pack_columns(
    batch: Batch, computed: WorkerOutputs, result: Advantages, actor: Actor, dtype: np.dtype
) -> list[Columns[np.ndarray]]:
    """Split matrices [B, L] and vectors [B] by training rank, and store the matrices flat, without padding."""
    layout = batch.layout
    matrices = {
        "advantages": result.advantages.numpy(),
        "returns": None if computed.values is None else result.returns.numpy(),
        "old_logprobs": computed.old_logprobs,
        "ref_logprobs": computed.ref_logprobs,
        "values": computed.values,
        "selected_tokens": choose_loss_tokens(batch, computed, result.advantages, actor),
    }
    columns: dict[str, Any] = {
        name: layout.split_matrix_by_rank(matrix, dtype if name in ("advantages", "returns") else None)
        for name, matrix in matrices.items()
        if matrix is not None
    } | {
        "loss_weights": layout.split_row_values(batch.loss_weights.astype(dtype)),
        "sequence_weights": layout.split_row_values(batch.sequence_weights.astype(dtype)),
        "value_weights": layout.split_row_values(batch.value_weights.astype(dtype)),
        "trajectory_ids": layout.split_row_values(batch.trajectory_ids.numpy()),
    }
    return [
        Columns(**{name: parts[rank] for name, parts in columns.items()}) for rank in range(len(layout.rank_batches))
    ]


def choose_loss_tokens(batch: Batch, computed: WorkerOutputs, advantages: Tensor, actor: Actor) -> np.ndarray | None:
    """Choose the tokens that the policy loss treats differently, e.g. tokens with high covariance (clip_cov, kl_cov).

    The choice is made per mini-batch, because micro-batches depend on lengths and the token budget.
    `batch.token_order_keys` gives the tokens a random order, which decides ties. Returns uint8 [B, L], 1 = chosen;
    None if the loss does not choose tokens.
    """
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    if policy_loss.select_tokens is None:
        return None
    assert computed.old_logprobs is not None and batch.token_order_keys is not None
    logp, keys = _to_float64_tensor(computed.old_logprobs), batch.token_order_keys
    counted = batch.mask.bool() & torch.from_numpy(batch.loss_weights > 0)[:, None]
    chosen = torch.zeros_like(counted)
    for rows in batch.layout.mini_batch_rows:
        positions, columns = counted[list(rows)].nonzero(as_tuple=True)
        token_rows = torch.tensor(rows)[positions]
        order = keys[token_rows, columns].argsort()
        index = token_rows[order], columns[order]
        chosen[index] = policy_loss.select_tokens(logp[index], advantages[index], actor)
    return chosen.numpy().astype(np.uint8)


def assign_turn_numbers(trajectories: Sequence[Trajectory], group_ids: Tensor, mask: Tensor) -> Turns:
    """Number the turns of a batch for step-level estimators (GiGPO), and find turns that start from the same state.

    Args:
        trajectories: N trajectories with one or more token sequences each, B sequences in total.
        group_ids: [B], group of each sequence.
        mask: [B, L], 1 on action tokens; position 0 is a sequence's first action token.
    """
    groups = group_ids.tolist()
    index = torch.full(mask.shape, -1, dtype=torch.int64)
    owners: list[int] = []
    anchors: dict[Hashable, int] = {}
    ids: list[int] = []
    number = 0
    for owner, trajectory in enumerate(trajectories):
        first = len(owners)
        for turn in trajectory.turns:
            owners.append(owner)
            ids.append(anchors.setdefault((groups[number], _get_anchor_state(turn)), len(anchors)))
        for row in trajectory.rows:
            begin = 0
            for offset, end in enumerate(row.turn_ends):
                end += 1 - row.response_start
                index[number, begin:end] = first + row.first_turn + offset
                begin = end
            number += 1
    return Turns(index.where(mask.bool(), torch.tensor(-1)), torch.tensor(owners), torch.tensor(ids))


def _get_anchor_state(turn: Turn) -> Hashable:
    """Return the environment's state before a turn: StepResult.info["state"], else the turn's context tokens."""
    state = turn.info.get("state")
    return tuple(turn.context_ids) if state is None else repr(state)


def _to_float64_tensor(matrix: np.ndarray) -> Tensor:
    return torch.from_numpy(matrix.astype(np.float64))
