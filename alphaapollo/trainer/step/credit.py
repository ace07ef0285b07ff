"""Compute advantages and returns on the driver, from a training batch and the log-probs and values of the workers.

Arrays have one value per response token of the batch, without padding. Only estimators that need matrices get padded
matrices, of a few whole groups at a time.

token rewards -> KL in the reward -> advantage estimator -> add the advantages of distillation -> split by training rank
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import AdvantageInputs, Estimator, Turns, get_estimator
from alphaapollo.algorithms.advantages.base import NO_ESTIMATOR, Trajectories
from alphaapollo.algorithms.kl import compute_target_advantages, subtract_kl
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.algorithms.statistics import Groups, standardize
from alphaapollo.batching.batch import Columns
from alphaapollo.config.schema import Actor, Algorithm, Config, Teacher
from alphaapollo.trainer.step.training_batch import WEIGHT_COLUMNS, TrainingBatch, sum_per_trajectory

CHUNK_CELLS = 2**22
"""Maximum number of cells of a padded matrix (32 MiB in float64). Only a chunk of one group may have more."""
CACHED_VALUES = 2**16  # number of values that fit into the processor's cache
ColumnDtype = Literal["float32", "float64"]
MODEL_COLUMNS = ("old_logprobs", "ref_logprobs", "values", "target_logprobs")  # columns that models compute


@dataclass(frozen=True)
class AssignedCredit:
    """Advantages and other inputs of the loss, split by training rank."""

    columns: list[Columns[np.ndarray]]  # one set of columns per rank
    advantages: np.ndarray  # [n], those of the columns in the order of the batch
    has_gradient: np.ndarray  # bool [B], whether a row of the same trajectory has a gradient
    metrics: dict[str, float]
    mean_return: float = 0.0  # mean return of an action token


def assign_credit(
    batch: TrainingBatch,
    computed: Columns[np.ndarray],
    config: Config,
    kl_coef: float = 0.0,
    dtype: ColumnDtype = "float32",
    baseline: float = 0.0,
) -> AssignedCredit:
    """Compute advantages and returns of a batch of B sequences, and split them by training rank.

    computed: log-probs and values from workers and servers, as arrays [n] in the order of the batch.
    kl_coef: coefficient of the KL penalty in the reward. dtype: of the computed columns. baseline: see AdvantageInputs.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    rewards, scores, metrics = _add_kl_penalty(batch, computed, algorithm, kl_coef)
    estimator = get_estimator(algorithm.adv_estimator)
    actions = slice(None) if batch.mask.all() else batch.mask != 0  # a slice copies nothing
    if estimator.scope == "trajectories":
        exact_dtype: ColumnDtype = dtype if computed.target_logprobs is None else "float64"  # for the sum below
        advantages = _expand_trajectory_advantages(batch, estimator, scores, algorithm, exact_dtype)
        returns = advantages
    else:
        advantages, returns = _estimate_in_chunks(
            batch, estimator, rewards, scores, computed.values, algorithm, baseline
        )
    mean_return = float(returns[actions].mean(dtype=np.float64))
    if estimator.whitens(algorithm):
        advantages[actions] = standardize(torch.from_numpy(advantages[actions]), ddof=1, eps=1e-8).numpy()
    advantages, target_metrics = _add_target_advantages(advantages, batch.mask, computed, config.teacher)
    advantages = advantages.astype(dtype, copy=False)
    has_advantage = np.logical_or.reduceat(advantages != 0, batch.layout.response_offsets[:-1])  # 0 outside the mask
    metrics |= target_metrics | {"critic/rewards/mean": float(scores.mean())}
    if algorithm.adv_estimator != NO_ESTIMATOR or computed.target_logprobs is not None:
        metrics |= compute_advantage_metrics(advantages[actions], has_advantage)
    if batch.length_penalty is not None:
        metrics["reward/length_penalty"] = batch.length_penalty
    columns = replace(
        computed,
        advantages=advantages,
        returns=None if computed.values is None else returns.astype(dtype, copy=False),
        target_logprobs=None,  # the advantages contain them
        selected_tokens=choose_loss_tokens(batch, computed, advantages, actor),
        trajectory_ids=batch.trajectory_ids.numpy(),
        **{name: getattr(batch, name).astype(dtype) for name in WEIGHT_COLUMNS},
    )
    has_own_gradient = has_advantage & ((batch.loss_weights != 0) | (batch.sequence_weights != 0))
    if config.teacher.uses_self_teacher:
        has_longer_prompt = batch.has_longer_prompt
        metrics["distill/rows_with_context"] = float(has_longer_prompt.mean())
        has_own_gradient |= has_longer_prompt & (batch.divergence_weights != 0)
    trajectory_of_row = batch.trajectory_ids.numpy()
    has_gradient = np.isin(trajectory_of_row, trajectory_of_row[has_own_gradient])
    return AssignedCredit(batch.layout.split_columns(columns), advantages, has_gradient, metrics, mean_return)


def describe_non_finite(columns: Columns[np.ndarray], mask: np.ndarray, offsets: np.ndarray) -> str:
    """Name the columns [n] with NaN or infinite values on action tokens; "" if there are none.

    mask: [n], 1 on action tokens (tokens that the model sampled). offsets: [B + 1], position of each row.
    """
    problems = []
    for name in MODEL_COLUMNS:
        values = getattr(columns, name)
        if values is not None and not np.isfinite(values.sum(dtype=np.float64)):
            is_bad_row = np.logical_or.reduceat(~np.isfinite(values) & (mask != 0), offsets[:-1])
            if is_bad_row.any():
                problems.append(f"{name} are NaN or infinite in {is_bad_row.sum()} of {len(is_bad_row)} rows")
    return "; ".join(problems)


def _add_kl_penalty(
    batch: TrainingBatch, computed: Columns[np.ndarray], algorithm: Algorithm, kl_coef: float
) -> tuple[np.ndarray, Tensor, dict[str, float]]:
    """Subtract the KL penalty from the token rewards [n] if algorithm.use_kl_in_reward. Also returns the sum of the
    rewards per trajectory [N], and metrics."""
    if not algorithm.use_kl_in_reward:
        return batch.token_rewards, batch.scores, {}
    assert computed.old_logprobs is not None and computed.ref_logprobs is not None
    shaped = subtract_kl(
        torch.from_numpy(batch.token_rewards),
        _to_float64_tensor(computed.old_logprobs),
        _to_float64_tensor(computed.ref_logprobs),
        torch.from_numpy(batch.mask),
        torch.from_numpy(np.diff(batch.trajectory_offsets)),
        kl_coef,
        algorithm.kl_penalty,
    )
    rewards = shaped.token_rewards.numpy()
    metrics = {
        "actor/reward_kl_penalty_coeff": kl_coef,
        "actor/reward_kl_penalty_per_sequence": float(shaped.kl_per_sequence),
        "actor/reward_kl_penalty": float(shaped.kl_per_token),
    }
    return rewards, sum_per_trajectory(rewards, batch.trajectory_offsets), metrics


def _add_target_advantages(
    advantages: np.ndarray, mask: np.ndarray, computed: Columns[np.ndarray], teacher: Teacher
) -> tuple[np.ndarray, dict[str, float]]:
    """Add the advantages from teacher and policy log-probs, if teacher.divergence=sampled. All [n]. Also returns
    metrics."""
    if computed.target_logprobs is None:
        return advantages, {}
    assert computed.old_logprobs is not None
    old, target = _to_float64_tensor(computed.old_logprobs), _to_float64_tensor(computed.target_logprobs)
    distillation = compute_target_advantages(old, target, torch.from_numpy(mask))
    metrics = {"distill/reverse_kl": distillation.reverse_kl, "distill/agreement": distillation.agreement}
    return advantages + teacher.coef * distillation.advantages.numpy(), metrics


def _expand_trajectory_advantages(
    batch: TrainingBatch, estimator: Estimator, scores: Tensor, algorithm: Algorithm, dtype: ColumnDtype
) -> np.ndarray:
    """Compute one advantage per trajectory and copy it to the action tokens, [n]."""
    rows_by_trajectory, others = Groups.from_ids(batch.trajectory_ids), batch.others
    mini_batch_ids = batch.mini_batch_ids if "mini_batches" in estimator.needs else None
    trajectories = Trajectories(
        rows_by_trajectory,
        Groups.from_ids(torch.cat([rows_by_trajectory.take_value_per_group(batch.group_ids), others.group_ids])),
        torch.cat([scores, others.scores]),
        torch.cat([batch.num_actions, others.num_actions]),
        components=batch.components,
        mini_batches=None if mini_batch_ids is None else rows_by_trajectory.take_value_per_group(mini_batch_ids),
    )
    computed = estimator.compute_for_trajectories(trajectories, algorithm)
    advantages = computed[: len(batch.trajectories)].numpy().astype(dtype)
    expanded = np.repeat(advantages, np.diff(batch.trajectory_offsets))
    expanded *= batch.mask
    return expanded


def split_into_chunks(group_ids: np.ndarray, lengths: np.ndarray, max_cells: int) -> list[tuple[int, int]]:
    """Split rows into chunks of whole groups whose matrices, padded to the longest row, have at most max_cells cells.

    A larger group is a chunk of its own. Rows of a group are consecutive.

    Args:
        group_ids: [B] group of each row.
        lengths: [B] response tokens of each row.

    Returns the first row and the end of each chunk.
    """
    starts = [0, *(np.flatnonzero(np.diff(group_ids)) + 1).tolist(), len(lengths)]
    chunks, first, width = [], 0, 0
    for start, end in pairwise(starts):
        longest = int(lengths[start:end].max())
        if start > first and (end - first) * max(width, longest) > max_cells:
            chunks.append((first, start))
            first, width = start, 0
        width = max(width, longest)
    return [*chunks, (first, len(lengths))]


def _estimate_in_chunks(
    batch: TrainingBatch,
    estimator: Estimator,
    rewards: np.ndarray,
    scores: Tensor,
    values: np.ndarray | None,
    algorithm: Algorithm,
    baseline: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute advantages and returns, float64 [n] each, with an estimator that needs matrices.

    rewards, values: [n]. scores: [N]. n: response tokens, N: trajectories. baseline: see AdvantageInputs.
    """
    offsets, lengths, needs = batch.layout.response_offsets, np.diff(batch.layout.response_offsets), estimator.needs
    max_cells = CHUNK_CELLS if estimator.scope == "groups" else len(lengths) * int(lengths.max())
    advantages, returns = np.empty(len(rewards)), np.empty(len(rewards))
    for first, end in split_into_chunks(batch.group_ids.numpy(), lengths, max_cells):
        chunk, rows = slice(offsets[first], offsets[end]), slice(first, end)
        inside = np.arange(lengths[rows].max()) < lengths[rows, None]  # [rows, longest row]
        trajectory_of_row = batch.trajectory_ids[rows]
        inputs = AdvantageInputs(
            token_rewards=_pad(rewards[chunk], inside),
            mask=_pad(batch.mask[chunk], inside),
            scores=scores[trajectory_of_row],
            group_ids=batch.group_ids[rows],
            trajectory_ids=trajectory_of_row,
            values=None if values is None else _pad(values[chunk], inside),
            components={name: component[trajectory_of_row] for name, component in batch.components.items()},
            greedy_rewards=None if batch.greedy_rewards is None else batch.greedy_rewards[rows],
            turns=batch.turns and _take_turns(batch.turns, chunk, inside, trajectory_of_row),
            mini_batches=batch.mini_batch_ids[rows] if "mini_batches" in needs else None,
            baseline=baseline,
        )
        result = estimator.compute_for_groups(inputs, algorithm)
        advantages[chunk], returns[chunk] = result.advantages.numpy()[inside], result.returns.numpy()[inside]
    return advantages, returns


def _pad(values: np.ndarray, inside: np.ndarray) -> Tensor:
    """Arrange the values of tokens in a float64 matrix; 0 elsewhere. inside: bool [B, L], whether a row has a token."""
    matrix = np.zeros(inside.shape)
    matrix[inside] = values
    return torch.from_numpy(matrix)


def _take_turns(turns: Turns, tokens: slice, inside: np.ndarray, trajectory_of_row: Tensor) -> Turns:
    """Return the turns of some trajectories. tokens: part of arrays [n]. inside: see _pad. trajectory_of_row: [B]."""
    bounds = torch.stack([trajectory_of_row[0], trajectory_of_row[-1] + 1])
    start, end = torch.searchsorted(turns.trajectory_ids, bounds).tolist()
    numbers = torch.full(inside.shape, -1)
    numbers[torch.from_numpy(inside)] = turns.turn_of_token[tokens]
    numbers = torch.where(numbers >= 0, numbers - start, -1)
    return Turns(numbers, turns.trajectory_ids[start:end], turns.anchor_ids[start:end])


def compute_advantage_metrics(advantages: np.ndarray, has_advantage: np.ndarray) -> dict[str, float]:
    """Compute statistics of the advantages of the tokens that the model sampled, [tokens]; {} if there are none.

    has_advantage: bool [B], sequences with a non-zero advantage.
    """
    if not len(advantages):
        return {}
    mean = float(advantages.mean(dtype=np.float64))
    return {
        "critic/advantages/mean": mean,
        "critic/advantages/std": math.sqrt(_sum_squared_deviations(advantages, mean) / len(advantages)),
        "critic/advantages/min": float(advantages.min()),
        "critic/advantages/max": float(advantages.max()),
        "critic/advantages/abs_mean": float(np.abs(advantages).mean(dtype=np.float64)),
        "critic/advantages/share_zero": float((~has_advantage).mean()),
    }


def _sum_squared_deviations(values: np.ndarray, mean: float) -> float:
    """Sum (values - mean)^2 in float64, in parts that fit into the processor's cache. The parts are those of numpy's
    pairwise summation, so the sum equals that of one array."""
    if len(values) > CACHED_VALUES:
        half = len(values) // 2
        half -= half % 8
        return _sum_squared_deviations(values[:half], mean) + _sum_squared_deviations(values[half:], mean)
    return float(np.square(values - np.float64(mean)).sum())


def choose_loss_tokens(
    batch: TrainingBatch, computed: Columns[np.ndarray], advantages: np.ndarray, actor: Actor
) -> np.ndarray | None:
    """Choose the tokens that the policy loss treats differently, e.g. tokens with high covariance (clip_cov, kl_cov).

    The choice is made per mini-batch, because micro-batches depend on lengths and the token budget.
    `batch.token_order_keys` gives the tokens a random order, which decides ties. advantages: [n]. Returns uint8 [n],
    1 = chosen; None if the loss does not choose tokens.
    """
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    if policy_loss.select_tokens is None:
        return None
    assert computed.old_logprobs is not None and batch.token_order_keys is not None
    offsets = batch.layout.response_offsets
    has_weight = (batch.mask != 0) & np.repeat(batch.loss_weights > 0, np.diff(offsets))
    chosen = np.zeros(len(has_weight), dtype=np.uint8)
    for rows in batch.layout.mini_batch_rows:
        tokens = np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])
        tokens = tokens[has_weight[tokens]]
        tokens = tokens[batch.token_order_keys[tokens].argsort()]
        old_logprobs = _to_float64_tensor(computed.old_logprobs[tokens])
        chosen[tokens] = policy_loss.choose_tokens(old_logprobs, _to_float64_tensor(advantages[tokens]), actor).numpy()
    return chosen


def _to_float64_tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float64))
