"""Rewards to advantages, on the driver.

Batch + columns from the workers -> KL in the reward -> the estimator -> what a teacher adds -> Columns per rank
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, Advantages, Estimator
from alphaapollo.algorithms.advantages.none import NO_ESTIMATOR
from alphaapollo.algorithms.divergence import teach
from alphaapollo.algorithms.kl import kl_in_reward
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.config.schema import NO_TEACHER, Actor, Algorithm, Teacher
from alphaapollo.data.batch import Columns
from alphaapollo.trainer.metrics.batch_metrics import advantage_metrics, length_penalty
from alphaapollo.trainer.step.token_choice import choose_tokens
from alphaapollo.trainer.step.training_batch import Batch, totals
from alphaapollo.trainer.step.trajectory_rewards import invalid_cost
from alphaapollo.trainer.step.turn_index import number_turns

ColumnDtype = Literal["float32", "float64"]


@dataclass(frozen=True)
class WorkerColumns:
    """What the workers computed about the rows, as matrices [B, L]; None where nobody asked."""

    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None


OF_WHOM = {
    "old_logprobs": "the policy's log-probs",
    "ref_logprobs": "the reference's log-probs",
    "values": "the critic's values",
    "teacher_logprobs": "the teacher's log-probs",
}


def not_finite(computed: WorkerColumns, mask: torch.Tensor) -> str:
    """Whose numbers are none where the policy acted (mask [B, L]), and in how many rows, in words; empty: nobody's."""
    found = []
    for name, words in OF_WHOM.items():
        matrix = getattr(computed, name)
        if matrix is not None and not np.isfinite(matrix.sum(dtype=np.float64)):
            bad = (~np.isfinite(matrix) & mask.bool().numpy()).any(axis=1)
            found += [f"{words} are NaN or infinite in {bad.sum()} of {len(bad)} rows"] if bad.any() else []
    return "; ".join(found)


@dataclass(frozen=True)
class Credit:
    """What the estimator made of a batch."""

    columns: list[Columns[np.ndarray]]  # a rank
    moving: np.ndarray  # bool [B], rows of trajectories that have a weight and somewhere an advantage
    kl_per_sequence: float | None  # nats, the mean over trajectories; None without a KL in the reward
    metrics: dict[str, float]


def assign_credit(
    batch: Batch,
    computed: WorkerColumns,
    estimator: Estimator,
    algorithm: Algorithm,
    actor: Actor,
    kl_coef: float,
    dtype: ColumnDtype = "float32",
    teacher: Teacher = NO_TEACHER,
) -> Credit:
    """Rewards to advantages: KL in the reward, the estimator, the teacher's part, then one set of flat columns a rank,
    those that are made here in `dtype`."""
    rewards, whole, metrics, kl_per_sequence = batch.token_rewards, batch.whole, {}, None
    if algorithm.use_kl_in_reward:
        assert computed.old_logprobs is not None and computed.ref_logprobs is not None
        old, ref = (whole.join(_double(one)) for one in (computed.old_logprobs, computed.ref_logprobs))
        shaped = kl_in_reward(whole.join(rewards), old, ref, whole.mask, kl_coef, algorithm.kl_penalty)
        rewards = whole.split(shaped.token_rewards)
        kl_per_sequence = float(shaped.per_sequence)
        metrics = {
            "kl/reward_coef": kl_coef,
            "kl/per_sequence": kl_per_sequence,
            "kl/per_token": float(shaped.per_token),
        }
    returns = totals(rewards, batch.trajectory_ids)
    inputs = AdvantageInputs(
        token_rewards=rewards,
        mask=batch.mask,
        scores=returns[batch.trajectory_ids],
        group_ids=batch.group_ids,
        trajectory_ids=batch.trajectory_ids,
        values=None if computed.values is None else _double(computed.values),
        components=batch.components,
        greedy_rewards=batch.greedy_rewards,
        turns=number_turns(batch.trajectories, batch.group_ids, batch.mask) if "turns" in estimator.needs else None,
        mini_batches=batch.mini_batch_ids if "mini_batches" in estimator.needs else None,
    )
    result = estimator(inputs, algorithm)
    if teacher.sampled:
        result, told = _with_teacher(result, batch, computed, teacher)
        metrics |= told
    has_advantage = np.asarray(result.advantages.numpy().any(axis=1))  # zero off the mask
    metrics["reward/shaped_mean"] = float(returns.mean())
    if estimator.name != NO_ESTIMATOR or teacher.sampled:
        metrics |= advantage_metrics(result.advantages, batch.mask, has_advantage)
    if algorithm.overlong_penalty.enable or algorithm.length_budget.mode:
        worth = whole.join(batch.token_rewards).sum(-1)
        metrics["reward/length_penalty"] = length_penalty(batch.trajectories, worth, invalid_cost(actor))
    matrices = {
        "advantages": result.advantages.numpy(),
        "returns": None if computed.values is None else result.returns.numpy(),  # a critic's
        "old_logprobs": computed.old_logprobs,
        "ref_logprobs": computed.ref_logprobs,
        "values": computed.values,
        "chosen": _chosen(batch, computed, result.advantages, actor),
    }
    columns = _columns(batch, {name: matrix for name, matrix in matrices.items() if matrix is not None}, dtype)
    return Credit(columns, _moving(batch, has_advantage), kl_per_sequence, metrics)


def _with_teacher(
    result: Advantages, batch: Batch, computed: WorkerColumns, teacher: Teacher
) -> tuple[Advantages, dict[str, float]]:
    """The estimator's advantages with the teacher's, and what it says of the batch."""
    assert computed.old_logprobs is not None and computed.teacher_logprobs is not None
    taught = teach(_double(computed.old_logprobs), _double(computed.teacher_logprobs), batch.mask)
    both = replace(result, advantages=result.advantages + teacher.coef * taught.advantages)
    return both, {"distill/reverse_kl": taught.reverse_kl, "distill/agreement": taught.agreement}


def _moving(batch: Batch, has_advantage: np.ndarray) -> np.ndarray:
    has_weight = (batch.loss_weights != 0) | (batch.sequence_weights != 0)
    owners = batch.trajectory_ids.numpy()
    return np.isin(owners, owners[has_advantage & has_weight])


def _chosen(batch: Batch, computed: WorkerColumns, advantages: torch.Tensor, actor: Actor) -> np.ndarray | None:
    """The tokens that the policy loss treats apart, where it has any. uint8 [B, L]"""
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    if policy_loss.choose is None:
        return None
    assert computed.old_logprobs is not None and batch.keys is not None
    counted = batch.mask.bool() & torch.from_numpy(batch.loss_weights > 0)[:, None]
    old, rows = _double(computed.old_logprobs), batch.layout.mini_batch_rows
    chosen = choose_tokens(policy_loss.choose, actor, old, advantages, counted, batch.keys, rows)
    return chosen.numpy().astype(np.uint8)


def _columns(batch: Batch, matrices: dict[str, np.ndarray], dtype: ColumnDtype) -> list[Columns[np.ndarray]]:
    """One set a rank; `matrices` [B, L] by the name of their column."""
    layout = batch.layout
    of_rows = {
        "loss_weights": batch.loss_weights.astype(dtype),
        "sequence_weights": batch.sequence_weights.astype(dtype),
        "value_weights": batch.value_weights.astype(dtype),
        "trajectory_ids": batch.trajectory_ids.numpy(),
    }
    made = dict.fromkeys(("advantages", "returns"), np.dtype(dtype))
    flat = {name: layout.split_columns(matrix, made.get(name)) for name, matrix in matrices.items()}
    columns: dict[str, Any] = flat | {name: layout.split_rows(values) for name, values in of_rows.items()}
    return [
        Columns(**{name: parts[rank] for name, parts in columns.items()}) for rank in range(len(layout.rank_batches))
    ]


def _double(matrix: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(matrix.astype(np.float64))
