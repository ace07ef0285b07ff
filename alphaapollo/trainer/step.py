"""Between rollout and gradient: plain functions on one iteration's data, without Ray and without workers.

groups -> build_batch -> Batch (layout frozen) -> [columns from the workers] -> assign_credit -> Columns per rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from alphaapollo.algorithms.advantages import AdvantageInputs, Estimator
from alphaapollo.algorithms.aggregation import row_weights, sequence_weights
from alphaapollo.algorithms.kl import kl_penalty
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.data.batch import Columns, TrainBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.seeds import derive_seed
from alphaapollo.types import Row, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Batch:
    """One iteration's B rows. Matrices are float64, response-aligned [B, L]: column 0 is a row's first action
    token."""

    rows: list[Row]
    layout: TrainBatch
    mask: torch.Tensor  # [B, L] 1 on action tokens
    token_rewards: torch.Tensor  # [B, L]
    group_ids: torch.Tensor  # [B]
    trajectory_ids: torch.Tensor  # [B], 0 .. N-1
    components: dict[str, torch.Tensor]  # [B] each, the trajectory's named rewards
    loss_weights: np.ndarray  # float32 [B]
    sequence_weights: np.ndarray  # float32 [B]


@dataclass(frozen=True)
class WorkerColumns:
    """What the workers computed about the rows, as matrices [B, L]; None where nobody asked."""

    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None


def trainable(trajectory: Trajectory) -> bool:
    """A failed trajectory has no reward, and one without an action token has nothing to train: neither takes part in
    any statistic."""
    return not trajectory.score.outcome.failed and bool(trajectory.rows)


def build_batch(
    groups: Sequence[TrajectoryGroup],
    actor: Actor,
    horizon: float,
    num_ranks: int,
    padded: bool,
    run_seed: int,
    step: int,
) -> Batch:
    """Flatten the groups into rows, deal them to ranks and micro-batches, and fix every denominator.

    Args:
        horizon: the constant of seq-mean-token-sum-norm.
        padded: micro-batches are padded to their longest row, so the token budget counts that.
    """
    members = [
        (group_id, trajectory)
        for group_id, group in enumerate(groups)
        for trajectory in group.trajectories
        if trainable(trajectory)
    ]
    rows = [row for _, trajectory in members for row in trajectory.rows]
    owners = [index for index, (_, trajectory) in enumerate(members) for _ in trajectory.rows]
    layout = build_train_batch(
        rows,
        owners,
        num_ranks=num_ranks,
        mini_batch_size=actor.ppo_mini_batch_size,
        max_tokens=actor.ppo_max_token_len_per_gpu,
        padded=padded,
        seed=derive_seed(run_seed, "mini_batches", step),
        shuffle=actor.shuffle,
    )
    mask = torch.from_numpy(layout.to_matrix([rank.rows.action_mask for rank in layout.rank_batches])).double()
    group_ids = torch.tensor([members[owner][0] for owner in owners])
    loss_weights, sequence = _weights(layout, mask, group_ids, actor, horizon)
    names = sorted({name for _, trajectory in members for name in trajectory.score.components})
    penalty = actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0
    return Batch(
        rows=rows,
        layout=layout,
        mask=mask,
        token_rewards=_token_rewards([trajectory for _, trajectory in members], mask, penalty),
        group_ids=group_ids,
        trajectory_ids=torch.tensor(owners),
        components={
            name: torch.tensor(
                [members[owner][1].score.components.get(name, float("nan")) for owner in owners], dtype=torch.float64
            )
            for name in names
        },
        loss_weights=loss_weights,
        sequence_weights=sequence,
    )


def _token_rewards(trajectories: Sequence[Trajectory], mask: torch.Tensor, penalty: float) -> torch.Tensor:
    """[B, L]: step rewards and penalties on the last action token of their turn, the outcome on the last of all."""
    rewards = torch.zeros_like(mask)
    index = 0
    for trajectory in trajectories:
        for row in trajectory.rows:
            start = row.response_start
            for turn, end in zip(trajectory.turns[row.first_turn :], row.turn_ends, strict=False):
                rewards[index, end - start] += turn.reward - (0.0 if turn.valid else penalty)
            index += 1
        rewards[index - 1, row.turn_ends[-1] - start] += trajectory.score.reward
    return rewards


def _weights(
    layout: TrainBatch, mask: torch.Tensor, group_ids: torch.Tensor, actor: Actor, horizon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Each row's weight in the loss of its mini-batch, over all ranks: (token-level, sequence-level)."""
    lengths = mask.sum(-1)
    token, sequence = torch.zeros_like(lengths), torch.zeros_like(lengths)
    for rows in layout.mini_batch_rows:
        token[rows] = row_weights(lengths[rows], group_ids[rows], actor.loss_agg_mode, horizon)
        sequence[rows] = sequence_weights(lengths[rows])
    return token.numpy().astype(np.float32), sequence.numpy().astype(np.float32)


def assign_credit(
    batch: Batch, computed: WorkerColumns, estimator: Estimator, algorithm: Algorithm, kl_coef: float
) -> tuple[list[Columns], dict[str, float]]:
    """Rewards to advantages: KL in the reward, the estimator, then one set of flat columns a rank."""
    rewards, metrics = batch.token_rewards, {}
    num_trajectories = int(batch.trajectory_ids.max()) + 1
    if algorithm.use_kl_in_reward:
        assert computed.old_logprobs is not None and computed.ref_logprobs is not None
        old, ref = _double(computed.old_logprobs), _double(computed.ref_logprobs)
        kl = kl_penalty(old, ref, algorithm.kl_penalty) * batch.mask
        rewards = rewards - kl_coef * kl
        metrics = {
            "kl/reward_coef": kl_coef,
            "kl/per_sequence": float(kl.sum()) / num_trajectories,
            "kl/per_token": float(kl.sum() / batch.mask.sum().clamp(min=1)),
        }
    returns = torch.zeros(num_trajectories, dtype=rewards.dtype).index_add_(0, batch.trajectory_ids, rewards.sum(-1))
    inputs = AdvantageInputs(
        token_rewards=rewards,
        mask=batch.mask,
        scores=returns[batch.trajectory_ids],
        group_ids=batch.group_ids,
        trajectory_ids=batch.trajectory_ids,
        values=None if computed.values is None else _double(computed.values),
        components=batch.components,
    )
    result = estimator(inputs, algorithm)
    metrics |= {
        "advantage/mean": _masked_mean(result.advantages, batch.mask),
        "advantage/abs_mean": _masked_mean(result.advantages.abs(), batch.mask),
        "advantage/share_zero": float((result.advantages.abs().sum(-1) == 0).float().mean()),
    }
    return _columns(batch, computed, result.advantages.numpy(), result.returns.numpy()), metrics


def _columns(batch: Batch, computed: WorkerColumns, advantages: np.ndarray, returns: np.ndarray) -> list[Columns]:
    layout = batch.layout

    def split(matrix: np.ndarray | None) -> list[np.ndarray] | list[None]:
        return [None] * len(layout.rank_batches) if matrix is None else layout.split_columns(matrix)

    columns = zip(
        split(advantages.astype(np.float32)),
        split(returns.astype(np.float32)),
        split(computed.old_logprobs),
        split(computed.ref_logprobs),
        split(computed.values),
        layout.split_rows(batch.loss_weights),
        layout.split_rows(batch.sequence_weights),
        strict=True,
    )
    return [Columns(*one) for one in columns]


def _double(matrix: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(matrix.astype(np.float64))


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    return float((values * mask).sum() / mask.sum().clamp(min=1))
