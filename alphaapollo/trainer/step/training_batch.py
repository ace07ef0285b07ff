"""One iteration's rows: dealt to ranks and micro-batches once, with every reward and every denominator.

groups -> build_batch -> Batch (layout frozen)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.aggregation import row_weights, sequence_weights
from alphaapollo.algorithms.correction import looks_at_sequences
from alphaapollo.algorithms.end_to_end import EndToEnd
from alphaapollo.algorithms.groups import Groups
from alphaapollo.algorithms.pf_ppo import filtration_weights
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.algorithms.reward_shaping import add_outcome_reward, overlong_filter
from alphaapollo.config.schema import Actor, Algorithm
from alphaapollo.data.batch import TrainBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.shared_prompts import SHARE_FROM, find_prefixes
from alphaapollo.trainer.step.token_choice import draw_keys
from alphaapollo.trainer.step.trajectory_rewards import invalid_cost, outcome_rewards, turn_reward
from alphaapollo.types import Prompt, Row, Trajectory, TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed

Member = tuple[Prompt, Trajectory]


@dataclass(frozen=True)
class Batch:
    """One iteration's B rows. Matrices are float64, response-aligned [B, L]: column 0 is a row's first action
    token."""

    rows: list[Row]
    layout: TrainBatch
    mask: torch.Tensor  # [B, L] 1 on action tokens
    whole: EndToEnd  # the rows of each trajectory as one: [B, L] <-> [N, K]
    token_rewards: torch.Tensor  # [B, L]
    group_ids: torch.Tensor  # [B]
    trajectory_ids: torch.Tensor  # [B], 0 .. N-1
    components: dict[str, torch.Tensor]  # [B] each, the trajectory's named rewards
    greedy_rewards: torch.Tensor | None  # [B] what the prompt's greedy rollout was worth
    trajectories: list[Trajectory]  # N, whose rows these are, in order
    loss_weights: np.ndarray  # float64 [B], as in Columns
    sequence_weights: np.ndarray  # float64 [B]
    value_weights: np.ndarray  # float64 [B]
    keys: torch.Tensor | None  # [B, L] a number drawn for each action token, for a loss that chooses some

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectories)

    @property
    def mini_batch_ids(self) -> torch.Tensor:
        """The mini-batch of each row. [B]"""
        ids = torch.empty(len(self.rows), dtype=torch.int64)
        for number, rows in enumerate(self.layout.mini_batch_rows):
            ids[rows] = number
        return ids


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
    sequence_parallel: int = 1,
    share_prompts: bool = False,
) -> Batch:
    """Flatten the groups into rows, deal them to ranks and micro-batches, and fix every reward and every denominator.

    Args:
        max_length: of a response in tokens.
        padded: micro-batches are padded to their longest row, so the token budget counts that.
        sequence_parallel: ranks that share the rows of each, and whose token budgets add up.
        share_prompts: compute what rows of a group have in common once, where that saves enough (SHARE_FROM).
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
        max_tokens=actor.ppo_max_token_len_per_gpu * sequence_parallel,
        padded=padded,
        seed=derive_seed(run_seed, "mini_batches", step),
        prefixes=find_prefixes(rows, group_of[owners].tolist()) if share_prompts else None,
        share_from=SHARE_FROM,
        **_mini_batches(group_of, actor, algorithm),
    )
    mask = torch.from_numpy(layout.to_matrix([rank.rows.action_mask for rank in layout.rank_batches])).double()
    whole = EndToEnd.of(mask, owners)
    rewards = _turn_rewards(members, mask, invalid_cost(actor))
    add_outcome_reward(rewards, outcome_rewards(members, algorithm, max_length), mask, owners)
    weights = _weights(layout, owners, _loss_lengths(members, whole, algorithm), whole, group_of, actor, max_length)
    if algorithm.filtration.method:
        weights *= filtration_weights(totals(rewards, owners), Groups.of(group_of), algorithm.filtration.method)
    loss_weights, sequence, value_weights = weights[:, owners].numpy()
    return Batch(
        rows=rows,
        layout=layout,
        mask=mask,
        whole=whole,
        token_rewards=rewards,
        group_ids=group_of[owners],
        trajectory_ids=owners,
        components=_components(members, owners),
        greedy_rewards=_greedy_rewards(groups, algorithm, max_length, invalid_cost(actor), group_of[owners]),
        trajectories=[trajectory for _, trajectory in members],
        loss_weights=loss_weights,
        sequence_weights=sequence,
        value_weights=value_weights,
        keys=_keys(actor, whole, members, run_seed, step),
    )


def _keys(actor: Actor, whole: EndToEnd, members: Sequence[Member], run_seed: int, step: int) -> torch.Tensor | None:
    if get_policy_loss(actor.policy_loss.loss_mode).choose is None:
        return None
    return draw_keys(whole, [trajectory for _, trajectory in members], run_seed, step)


def _mini_batches(group_of: torch.Tensor, actor: Actor, algorithm: Algorithm) -> dict[str, Any]:
    """How build_train_batch is to cut an iteration."""
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
    return {
        "mini_batch_size": actor.ppo_mini_batch_size,
        "shuffle": actor.shuffle,
        "group_ids": _undivided(group_of, actor, algorithm),
        "whole_trajectories": policy_loss.whole or looks_at_sequences(algorithm.rollout_correction),
    }


def _undivided(group_of: torch.Tensor, actor: Actor, algorithm: Algorithm) -> list[int] | None:
    """The group 0 .. G-1 of each trajectory, where a group must share a mini-batch: what is normalised over that, by
    the estimator or the aggregation, is about groups. [N]"""
    by_mini_batch = "mini_batches" in get_estimator(algorithm.adv_estimator).needs
    if not by_mini_batch and actor.loss_agg_mode != "group-mean-token-mean":
        return None
    numbers: list[int] = torch.unique(group_of, return_inverse=True)[1].tolist()
    return numbers


def _turn_rewards(members: Sequence[Member], mask: torch.Tensor, penalty: float) -> torch.Tensor:
    """[B, L]: step rewards and penalties on the last action token of their turn."""
    rewards = np.zeros(mask.shape)  # nearly all of it stays untouched, and then takes no memory
    owned = [(trajectory, row) for _, trajectory in members for row in trajectory.rows]
    for index, (trajectory, row) in enumerate(owned):
        for turn, end in zip(trajectory.turns[row.first_turn :], row.turn_ends, strict=False):
            if amount := turn_reward(turn, penalty):
                rewards[index, end - row.response_start] += amount
    return torch.from_numpy(rewards)


def _greedy_rewards(
    groups: Sequence[TrajectoryGroup], algorithm: Algorithm, max_length: int, penalty: float, group_ids: torch.Tensor
) -> torch.Tensor | None:
    """What the greedy rollout of each row's group was worth, by the same rules as the others. [B]"""
    played = [(group.prompt, group.baseline) for group in groups if group.baseline is not None]
    if not played:
        return None
    steps = [sum(turn_reward(turn, penalty) for turn in baseline.turns) for _, baseline in played]
    worth = outcome_rewards(played, algorithm, max_length) + torch.tensor(steps, dtype=torch.float64)
    return worth[group_ids]


def _components(members: Sequence[Member], owners: torch.Tensor) -> dict[str, torch.Tensor]:
    """The named rewards on each row, [B]; nan where a trajectory lacks one."""
    names = sorted({name for _, trajectory in members for name in trajectory.score.components})
    values = {name: [trajectory.score.component(name) for _, trajectory in members] for name in names}
    return {name: torch.tensor(column, dtype=torch.float64)[owners] for name, column in values.items()}


def _loss_lengths(members: Sequence[Member], whole: EndToEnd, algorithm: Algorithm) -> torch.Tensor:
    """Tokens of each trajectory that the loss sees: its action tokens, or none where DAPO's overlong filter is on and
    it was cut. [N]"""
    cut = torch.tensor([algorithm.overlong_filter and trajectory.truncated for _, trajectory in members])
    return overlong_filter(whole.mask.sum(-1, keepdim=True), cut).squeeze(-1)


def _weights(
    layout: TrainBatch,
    owners: torch.Tensor,
    loss_lengths: torch.Tensor,
    whole: EndToEnd,
    group_ids: torch.Tensor,
    actor: Actor,
    max_length: int,
) -> torch.Tensor:
    """Each trajectory's weight in the losses of its mini-batch, over all ranks: token-level, sequence-level, the
    critic's (a mean over all action tokens). Its rows share it: a sequence is a trajectory. [3, N]"""
    horizon, count = actor.loss_scale_factor or float(max_length), actor.loss_agg_count
    lengths = whole.mask.sum(-1)
    weights = torch.zeros(3, len(lengths), dtype=torch.float64)
    for rows in layout.mini_batch_rows:
        own = owners[rows].unique()
        weights[0, own] = row_weights(loss_lengths[own], group_ids[own], actor.loss_agg_mode, horizon, count)
        weights[1, own] = sequence_weights(loss_lengths[own], count)
        weights[2, own] = row_weights(lengths[own], group_ids[own], "token-mean", horizon)
    return weights


def totals(rewards: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """Each trajectory's rewards summed, rounded once: the same rewards in another order are worth exactly the same, and
    a group of them stays all-equal.

    Args:
        rewards: [B, L], zero off the mask.
        owners: [B], the trajectory of each row, 0 .. N-1 in order.
    """
    parts: list[list[float]] = [[] for _ in range(int(owners[-1]) + 1)]
    for owner, row in zip(owners.tolist(), rewards.numpy(), strict=True):
        parts[owner].extend(row[row != 0].tolist())
    return torch.tensor([math.fsum(part) for part in parts], dtype=rewards.dtype)
