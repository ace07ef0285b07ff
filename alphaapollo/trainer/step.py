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
from alphaapollo.algorithms.filtration import filtration_weights
from alphaapollo.algorithms.groups import Groups
from alphaapollo.algorithms.reward_shaping import kl_in_reward, overlong_filter
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.data.batch import Columns, TrainBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.seeds import derive_seed
from alphaapollo.trainer.shaping import outcome_rewards, turn_reward
from alphaapollo.trainer.turns import number_turns
from alphaapollo.types import Prompt, Row, Trajectory, TrajectoryGroup

Member = tuple[Prompt, Trajectory]


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
    greedy_rewards: torch.Tensor | None  # [B] what the prompt's greedy rollout was worth
    trajectories: list[Trajectory]  # N, whose rows these are, in order
    loss_weights: np.ndarray  # float32 [B], as in Columns
    sequence_weights: np.ndarray  # float32 [B]
    value_weights: np.ndarray  # float32 [B]

    @property
    def num_trajectories(self) -> int:
        return int(self.trajectory_ids.max()) + 1


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


def usable(group: TrajectoryGroup) -> bool:
    """Something to train on, and to compare it with: neither all samples failed nor the greedy baseline."""
    compared = group.baseline is None or not group.baseline.score.outcome.failed
    return compared and any(trainable(trajectory) for trajectory in group.trajectories)


def build_batch(
    groups: Sequence[TrajectoryGroup],
    actor: Actor,
    algorithm: Algorithm,
    max_length: int,
    num_ranks: int,
    padded: bool,
    run_seed: int,
    step: int,
) -> Batch:
    """Flatten the groups into rows, deal them to ranks and micro-batches, and fix every reward and every denominator.

    Args:
        max_length: of a response in tokens.
        padded: micro-batches are padded to their longest row, so the token budget counts that.
    """
    assert all(usable(group) for group in groups), "collect leaves the others out"
    members = [(group.prompt, one) for group in groups for one in group.trajectories if trainable(one)]
    group_of = torch.tensor([i for i, group in enumerate(groups) for one in group.trajectories if trainable(one)])
    rows = [row for _, trajectory in members for row in trajectory.rows]
    owners = torch.tensor([index for index, (_, trajectory) in enumerate(members) for _ in trajectory.rows])
    layout = build_train_batch(
        rows,
        owners.tolist(),
        num_ranks=num_ranks,
        mini_batch_size=actor.ppo_mini_batch_size,
        max_tokens=actor.ppo_max_token_len_per_gpu,
        padded=padded,
        seed=derive_seed(run_seed, "mini_batches", step),
        shuffle=actor.shuffle,
    )
    mask = torch.from_numpy(layout.to_matrix([rank.rows.action_mask for rank in layout.rank_batches])).double()
    penalty = actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0
    rewards = _token_rewards(members, outcome_rewards(members, algorithm, max_length), mask, penalty)
    lengths = _loss_lengths(members, owners, mask, algorithm)
    weights = _weights(layout, lengths, mask.sum(-1), group_of[owners], actor, max_length)
    if algorithm.filtration.method:
        totals = torch.zeros(len(members), dtype=rewards.dtype).index_add_(0, owners, rewards.sum(-1))
        weights *= filtration_weights(totals, Groups.of(group_of), algorithm.filtration.method)[owners]
    loss_weights, sequence, value_weights = weights.numpy().astype(np.float32)
    greedy = _greedy_rewards(groups, algorithm, max_length, penalty)
    return Batch(
        rows=rows,
        layout=layout,
        mask=mask,
        token_rewards=rewards,
        group_ids=group_of[owners],
        trajectory_ids=owners,
        components=_components(members, owners),
        greedy_rewards=None if greedy is None else greedy[group_of[owners]],
        trajectories=[trajectory for _, trajectory in members],
        loss_weights=loss_weights,
        sequence_weights=sequence,
        value_weights=value_weights,
    )


def _token_rewards(
    members: Sequence[Member], outcomes: torch.Tensor, mask: torch.Tensor, penalty: float
) -> torch.Tensor:
    """[B, L]: step rewards and penalties on the last action token of their turn, the outcome on the last of all."""
    rewards = torch.zeros_like(mask)
    index = 0
    for (_, trajectory), outcome in zip(members, outcomes, strict=True):
        for row in trajectory.rows:
            start = row.response_start
            for turn, end in zip(trajectory.turns[row.first_turn :], row.turn_ends, strict=False):
                rewards[index, end - start] += turn_reward(turn, penalty)
            index += 1
        rewards[index - 1, row.turn_ends[-1] - start] += outcome
    return rewards


def _greedy_rewards(
    groups: Sequence[TrajectoryGroup], algorithm: Algorithm, max_length: int, penalty: float
) -> torch.Tensor | None:
    """What each group's greedy rollout was worth, by the same rules as the others. [G]"""
    played = [(group.prompt, group.baseline) for group in groups if group.baseline is not None]
    if not played:
        return None
    steps = [sum(turn_reward(turn, penalty) for turn in baseline.turns) for _, baseline in played]
    return outcome_rewards(played, algorithm, max_length) + torch.tensor(steps, dtype=torch.float64)


def _components(members: Sequence[Member], owners: torch.Tensor) -> dict[str, torch.Tensor]:
    """The named rewards on each row, [B]; nan where a trajectory lacks one."""
    names = sorted({name for _, trajectory in members for name in trajectory.score.components})
    values = {
        name: [trajectory.score.components.get(name, float("nan")) for _, trajectory in members] for name in names
    }
    return {name: torch.tensor(column, dtype=torch.float64)[owners] for name, column in values.items()}


def _loss_lengths(
    members: Sequence[Member], owners: torch.Tensor, mask: torch.Tensor, algorithm: Algorithm
) -> torch.Tensor:
    """Tokens of each row that the loss sees: its action tokens, or none where DAPO's overlong filter is on and its
    trajectory was cut. [B]"""
    cut = torch.tensor([algorithm.overlong_filter and trajectory.truncated for _, trajectory in members])
    return overlong_filter(mask, cut[owners]).sum(-1)


def _weights(
    layout: TrainBatch,
    loss_lengths: torch.Tensor,
    lengths: torch.Tensor,
    group_ids: torch.Tensor,
    actor: Actor,
    max_length: int,
) -> torch.Tensor:
    """Each row's weight in the losses of its mini-batch, over all ranks: token-level, sequence-level, the critic's
    (a mean over all action tokens). [3, B]"""
    horizon = actor.loss_scale_factor or float(max_length)
    weights = torch.zeros(3, len(lengths), dtype=torch.float64)
    for rows in layout.mini_batch_rows:
        ids = group_ids[rows]
        weights[0, rows] = row_weights(loss_lengths[rows], ids, actor.loss_agg_mode, horizon)
        weights[1, rows] = sequence_weights(loss_lengths[rows])
        weights[2, rows] = row_weights(lengths[rows], ids, "token-mean", horizon)
    return weights


def assign_credit(
    batch: Batch, computed: WorkerColumns, estimator: Estimator, algorithm: Algorithm, kl_coef: float
) -> tuple[list[Columns], dict[str, float]]:
    """Rewards to advantages: KL in the reward, the estimator, then one set of flat columns a rank."""
    rewards, metrics = batch.token_rewards, {}
    num_trajectories = batch.num_trajectories
    if algorithm.use_kl_in_reward:
        assert computed.old_logprobs is not None and computed.ref_logprobs is not None
        old, ref = _double(computed.old_logprobs), _double(computed.ref_logprobs)
        shaped = kl_in_reward(rewards, old, ref, batch.mask, kl_coef, algorithm.kl_penalty)
        rewards, total = shaped.token_rewards, float(shaped.kl.sum())
        metrics = {
            "kl/reward_coef": kl_coef,
            "kl/per_sequence": total / num_trajectories,  # a trajectory may have several rows
            "kl/per_token": total / max(1.0, float(batch.mask.sum())),
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
        greedy_rewards=batch.greedy_rewards,
        turns=number_turns(batch.trajectories, batch.group_ids, batch.mask) if "turns" in estimator.needs else None,
    )
    result = estimator(inputs, algorithm)
    metrics |= {
        "reward/shaped_mean": float(returns.mean()),
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
        layout.split_rows(batch.value_weights),
        strict=True,
    )
    return [Columns(*one) for one in columns]


def _double(matrix: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(matrix.astype(np.float64))


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    return float((values * mask).sum() / mask.sum().clamp(min=1))
