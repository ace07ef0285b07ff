"""Build the training batch of one iteration from rollout groups: rows (token sequences to train on), assigned to ranks
and micro-batches, with their rewards and loss weights."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.aggregation import row_weights
from alphaapollo.algorithms.mismatch import needs_full_sequence
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.algorithms.reward_shaping import (
    apply_exact_budget,
    apply_max_budget,
    filtration_weights,
    overlong_filter,
    select_samples,
    soft_overlong_punishment,
)
from alphaapollo.algorithms.statistics import Groups
from alphaapollo.batching.batch import BatchLayout
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.config.schema import Actor, Algorithm, Config
from alphaapollo.trainer.step.distillation import has_target, list_rows
from alphaapollo.types import Prompt, Row, Trajectory, TrajectoryGroup, Turn
from alphaapollo.utils.seeds import derive_seed

WEIGHTS = ("loss_weights", "sequence_weights", "value_weights", "divergence_weights")
PromptTrajectory = tuple[Prompt, Trajectory]
BUDGET = "length_budget"
"""Key in extra_info that algorithm.length_budget reads: a number of tokens."""


@dataclass(frozen=True)
class UnselectedSamples:
    """K samples of the groups that are not trained on, but whose rewards the estimator compares."""

    trajectories: list[Trajectory]
    scores: Tensor  # float64 [K]
    group_ids: Tensor  # [K]

    @property
    def num_actions(self) -> Tensor:
        """Action tokens of each sample, float64 [K]."""
        counts = [sum(sum(row.action_mask) for row in one.rows) for one in self.trajectories]
        return torch.tensor(counts, dtype=torch.float64)


@dataclass(frozen=True)
class TrainingBatch:
    """Training batch of one iteration: B rows (token sequences) of N trajectories, with n response tokens.

    Rows of a trajectory, and trajectories of a group, are consecutive. The first response token of a row is the first
    one that the model sampled. layout.response_offsets has the position of each row in the arrays [n].
    """

    rows: list[Row]
    layout: BatchLayout
    mask: np.ndarray  # uint8 [n] 1 on action tokens
    token_rewards: np.ndarray  # float64 [n]
    trajectory_offsets: np.ndarray  # int64 [N + 1] position of each trajectory in the arrays [n]
    num_actions: Tensor  # float64 [N] action tokens of each trajectory
    group_ids: Tensor  # [B]
    trajectory_ids: Tensor  # [B], 0 .. N-1
    components: dict[str, Tensor]  # [N] each, named rewards; NaN if the trajectory does not have it
    greedy_rewards: Tensor | None  # [B] reward of the prompt's greedy rollout
    trajectories: list[Trajectory]  # N, in the order of their rows
    loss_weights: np.ndarray  # float64 [B], as in Columns
    sequence_weights: np.ndarray  # float64 [B]
    value_weights: np.ndarray  # float64 [B]
    divergence_weights: np.ndarray  # float64 [B]
    token_order_keys: np.ndarray | None  # float64 [n] random order of the action tokens, for losses that choose tokens
    unselected: UnselectedSamples | None = None  # further samples for the estimator

    @property
    def mini_batch_ids(self) -> Tensor:
        """Index of each row's mini-batch, int64 [B]."""
        ids = torch.empty(len(self.rows), dtype=torch.int64)
        for number, rows in enumerate(self.layout.mini_batch_rows):
            ids[rows] = number
        return ids


def is_trainable(trajectory: Trajectory) -> bool:
    """Whether the trajectory can be trained on: its score did not fail, and the model sampled at least one token."""
    return not trajectory.score.outcome.failed and bool(trajectory.rows)


def is_usable_for_training(group: TrajectoryGroup) -> bool:
    """Whether at least one sample of the group can be trained on, and its greedy baseline (if any) did not fail."""
    compared = group.baseline is None or not group.baseline.score.outcome.failed
    return compared and any(is_trainable(trajectory) for trajectory in group.trajectories)


def build_batch(
    groups: Sequence[TrajectoryGroup],
    config: Config,
    step: int,
    num_ranks: int,
    max_tokens: int,
    padded: bool,
    uses_shared_prompts: bool,
) -> TrainingBatch:
    """Flatten groups into rows (token sequences), assign these to ranks, and compute rewards and loss weights.

    Args:
        max_tokens: token budget of a micro-batch on each of the num_ranks data-parallel ranks.
        padded: micro-batches are padded to their longest row; padding counts in the token budget.
        uses_shared_prompts: compute the common prefix of a group's rows once, if this saves enough tokens.
    """
    actor, algorithm, seed = config.actor_rollout_ref.actor, config.algorithm, config.trainer.seed
    pairs, group_of, unselected = _select_trajectories(*_list_trainable(groups), config, step)
    rows, trajectories = [row for pair in pairs for row in list_rows(*pair, config)], [one for _, one in pairs]
    owners = torch.tensor([index for index, trajectory in enumerate(trajectories) for _ in trajectory.rows])
    policy_loss, max_length = get_policy_loss(actor.policy_loss.loss_mode), config.data.max_response_length
    layout = build_batch_layout(
        rows,
        owners.tolist(),
        num_ranks=num_ranks,
        mini_batch_size=actor.ppo_mini_batch_size,
        max_tokens=max_tokens,
        padded=padded,
        seed=derive_seed(seed, "mini_batches", step),
        shuffle=actor.shuffle,
        group_ids=_get_unsplittable_group_ids(group_of, actor, algorithm),
        needs_full_sequence=policy_loss.needs_full_sequence or needs_full_sequence(algorithm.rollout_correction),
        shared_prompts=find_shared_prompts(rows, group_of[owners].tolist()) if uses_shared_prompts else None,
        num_mini_batches=config.num_mini_batches if algorithm.filter_groups.reweights else None,
    )
    mask = layout.join_columns([rank.rows.action_mask for rank in layout.rank_batches])
    offsets = layout.response_offsets[np.searchsorted(owners.numpy(), np.arange(len(trajectories) + 1))]
    num_actions = torch.from_numpy(np.add.reduceat(mask, offsets[:-1], dtype=np.float64))
    outcomes, penalty = shape_outcome_rewards(pairs, algorithm, max_length), get_invalid_action_penalty(actor)
    rewards = place_rewards(trajectories, outcomes.tolist(), layout.response_offsets, penalty)
    weights = _compute_loss_weights(trajectories, num_actions, layout.mini_batch_rows, owners, group_of, config)
    if (method := algorithm.filtration.method) in ("best", "best_random", "best_worst"):
        weights *= filtration_weights(sum_rewards_per_trajectory(rewards, offsets), Groups.from_ids(group_of), method)
    order = draw_token_order(layout.response_offsets, trajectories, seed, step) if policy_loss.select_tokens else None
    return TrainingBatch(
        rows=rows,
        layout=layout,
        mask=mask,
        token_rewards=rewards,
        trajectory_offsets=offsets,
        num_actions=num_actions,
        group_ids=group_of[owners],
        trajectory_ids=owners,
        components=get_reward_components(trajectories),
        greedy_rewards=_compute_greedy_rewards(groups, algorithm, actor, max_length, group_of[owners]),
        trajectories=trajectories,
        **dict(zip(WEIGHTS, weights[:, owners].numpy(), strict=True)),
        token_order_keys=order,
        unselected=unselected,
    )


def _list_trainable(groups: Sequence[TrajectoryGroup]) -> tuple[list[PromptTrajectory], Tensor]:
    """Return the N trajectories that can be trained on with their prompts, and the group index of each, [N]."""
    assert all(is_usable_for_training(group) for group in groups), "collect_groups() must drop unusable groups"
    kept = [
        (i, (group.prompt, one)) for i, group in enumerate(groups) for one in group.trajectories if is_trainable(one)
    ]
    return [pair for _, pair in kept], torch.tensor([index for index, _ in kept])


def _select_trajectories(
    pairs: list[PromptTrajectory], group_ids: Tensor, config: Config, step: int
) -> tuple[list[PromptTrajectory], Tensor, UnselectedSamples | None]:
    """Select the samples of each group to train on (algorithm.filtration). Returns them with their group indices, and
    the other samples if the estimator compares all."""
    filtration = config.algorithm.filtration
    if not filtration.selects:
        return pairs, group_ids, None
    assert filtration.size is not None
    seed, max_length = config.trainer.seed, config.data.max_response_length
    scores = _sum_shaped_rewards(pairs, config.algorithm, config.actor_rollout_ref.actor, max_length)
    draws = (derive_seed(seed, "filtration", step, one.prompt_id, one.sample) for _, one in pairs)
    noise = torch.tensor([np.random.default_rng(draw).random() for draw in draws])
    groups = Groups.from_ids(group_ids)
    selected = select_samples(scores, groups, filtration.size, filtration.method, noise)
    kept = [pair for pair, is_selected in zip(pairs, selected, strict=True) if is_selected]
    if filtration.baseline == "selected":
        return kept, group_ids[selected], None
    others = [one for (_, one), is_selected in zip(pairs, selected, strict=True) if not is_selected]
    return kept, group_ids[selected], UnselectedSamples(others, scores[~selected], group_ids[~selected])


def draw_token_order(
    response_offsets: np.ndarray, trajectories: Sequence[Trajectory], run_seed: int, step: int
) -> np.ndarray:
    """Draw a random number in [0, 1) per action token. Returns [n]. Each trajectory has a seed of its own."""
    noise = np.zeros(response_offsets[-1])
    for trajectory, starts in zip(trajectories, _find_row_starts(trajectories, response_offsets), strict=True):
        seed = derive_seed(run_seed, "choice", step, trajectory.prompt_id, trajectory.sample)
        generator = np.random.default_rng(seed)
        for one in list_trained_turns(trajectory):
            noise[starts[one.row] + one.start : starts[one.row] + one.end] = generator.random(one.end - one.start)
    return noise


def _find_row_starts(trajectories: Sequence[Trajectory], response_offsets: np.ndarray) -> Iterator[list[int]]:
    """Yield for each trajectory the positions of its rows' token 0 in the arrays [n], which begin with the response."""
    offsets = iter(response_offsets.tolist())
    for trajectory in trajectories:
        yield [next(offsets) - row.response_start for row in trajectory.rows]


def shape_outcome_rewards(pairs: Sequence[PromptTrajectory], algorithm: Algorithm, max_response_length: int) -> Tensor:
    """Return the reward of each trajectory with DAPO's overlong penalty and L1's length budget, if enabled.

    pairs: N prompts with one of their trajectories. Returns float64 [N].
    """
    rewards = torch.tensor([trajectory.score.reward for _, trajectory in pairs], dtype=torch.float64)
    if (budget := algorithm.length_budget).mode:
        lengths = torch.tensor([trajectory.num_tokens for _, trajectory in pairs], dtype=torch.float64)
        budgets = torch.tensor([float(prompt.extra_info[BUDGET]) for prompt, _ in pairs], dtype=torch.float64)
        if budget.mode == "exact":
            rewards = apply_exact_budget(rewards, lengths, budgets, budget.coef)
        else:
            rewards = apply_max_budget(rewards, lengths, budgets, budget.coef)
    if (penalty := algorithm.overlong_penalty).enable:
        lengths = torch.tensor([trajectory.response_length for _, trajectory in pairs], dtype=torch.float64)
        cache = penalty.cache or max(1, max_response_length // 5)
        rewards = rewards + soft_overlong_punishment(lengths, max_response_length, cache, penalty.factor)
    return rewards


def check_prompts_have_length_budgets(prompts: Iterable[Prompt]) -> None:
    """Raise ValueError for a prompt without a token budget in extra_info, which algorithm.length_budget needs."""
    for prompt in prompts:
        budget = prompt.extra_info.get(BUDGET)
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
            raise ValueError(
                f"algorithm.length_budget needs a number of tokens in extra_info.{BUDGET} of every row; row "
                f"{prompt.id} has {budget!r}. Add the number and mention it in the prompt, or set "
                "algorithm.length_budget.mode=null."
            )


def get_invalid_action_penalty(actor: Actor) -> float:
    """Return the reward penalty for a turn whose action could not be parsed; 0 if disabled."""
    return actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0


def compute_turn_reward(turn: Turn, invalid_action_penalty: float) -> float:
    """Return the environment's step reward, minus the penalty if the action is invalid."""
    return turn.reward - (0.0 if turn.valid else invalid_action_penalty)


def sum_rewards_per_trajectory(rewards: np.ndarray, trajectory_offsets: np.ndarray) -> Tensor:
    """Sum the token rewards [n] of each trajectory, in any order (math.fsum rounds once). Returns float64 [N]."""
    positions = np.flatnonzero(rewards)
    values, bounds = rewards[positions].tolist(), np.searchsorted(positions, trajectory_offsets).tolist()
    return torch.tensor([math.fsum(values[start:end]) for start, end in pairwise(bounds)], dtype=torch.float64)


def _get_unsplittable_group_ids(trajectory_group_ids: Tensor, actor: Actor, algorithm: Algorithm) -> list[int] | None:
    """Return the group index 0 .. G-1 of each trajectory if a group must stay in one mini-batch, else None.

    Estimators that normalize over a mini-batch and group-mean-token-mean aggregation require this."""
    by_mini_batch = "mini_batches" in get_estimator(algorithm.adv_estimator).needs
    if not by_mini_batch and actor.loss_agg_mode != "group-mean-token-mean":
        return None
    numbers: list[int] = torch.unique(trajectory_group_ids, return_inverse=True)[1].tolist()
    return numbers


def place_rewards(
    trajectories: Sequence[Trajectory],
    outcome_rewards: Sequence[float],
    response_offsets: np.ndarray,
    invalid_action_penalty: float,
) -> np.ndarray:
    """Return token rewards [n], each on the last action token of a turn.

    A step reward and the invalid-action penalty are on their turn. A reward of an agent's turn that is not trained on
    is on the last trained turn before it, or on the first one. The outcome's reward [N] is on the last trained turn.
    """
    rewards = np.zeros(response_offsets[-1])
    row_starts = _find_row_starts(trajectories, response_offsets)
    for trajectory, starts, outcome_reward in zip(trajectories, row_starts, outcome_rewards, strict=True):
        trained = list_trained_turns(trajectory)
        ends = [starts[one.row] + one.end - 1 for one in trained]
        times = [one.turn.answer_number for one in trained]
        for one, end in zip(trained, ends, strict=True):
            rewards[end] += compute_turn_reward(one.turn, invalid_action_penalty)
        for turn in trajectory.turns[len(trained) :]:
            rewards[ends[max(0, bisect(times, turn.answer_number) - 1)]] += turn.reward
        rewards[ends[-1]] += outcome_reward
    return rewards


def _compute_greedy_rewards(
    groups: Sequence[TrajectoryGroup], algorithm: Algorithm, actor: Actor, max_length: int, group_ids: Tensor
) -> Tensor | None:
    """Return the reward of the greedy rollout of each row's group (ReMax), [B]; None without greedy rollouts."""
    baselines = [(group.prompt, group.baseline) for group in groups if group.baseline is not None]
    if not baselines:
        return None
    return _sum_shaped_rewards(baselines, algorithm, actor, max_length)[group_ids]


def _sum_shaped_rewards(
    pairs: Sequence[PromptTrajectory], algorithm: Algorithm, actor: Actor, max_length: int
) -> Tensor:
    """Return the shaped reward of each of N trajectories, with its step rewards and penalties. float64 [N]"""
    penalty = get_invalid_action_penalty(actor)
    steps = [sum(compute_turn_reward(turn, penalty) for turn in trajectory.turns) for _, trajectory in pairs]
    return shape_outcome_rewards(pairs, algorithm, max_length) + torch.tensor(steps, dtype=torch.float64)


def get_reward_components(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return the value of each reward component per trajectory, [N]; NaN if the trajectory does not have it."""
    names = sorted({name for trajectory in trajectories for name in trajectory.score.components})
    values = {name: [trajectory.score.component(name) for trajectory in trajectories] for name in names}
    return {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}


def _compute_loss_weights(
    trajectories: Sequence[Trajectory],
    num_actions: Tensor,
    mini_batch_rows: Sequence[list[int]],
    owners: Tensor,
    group_ids: Tensor,
    config: Config,
) -> Tensor:
    """Compute the loss weights of the N trajectories in their mini-batches (of all ranks), as a matrix [4, N].

    The rows are for the token-level policy loss, the sequence-level policy loss, the critic's loss (a mean over
    tokens), and the divergence from a target: as the first, but over the trajectories that have one. mini_batch_rows:
    rows of each mini-batch. owners: [B], trajectory of each row. group_ids: [N].
    """
    actor = config.actor_rollout_ref.actor
    horizon = actor.loss_scale_factor or float(config.data.max_response_length)
    cut = torch.tensor([config.algorithm.overlong_filter and trajectory.truncated for trajectory in trajectories])
    loss_lengths = overlong_filter(num_actions.unsqueeze(1), cut).squeeze(1)
    is_taught = torch.tensor([has_target(trajectory.rows, config) for trajectory in trajectories])
    weights = torch.zeros(4, len(trajectories), dtype=torch.float64)
    full = config.trajectories_per_update / config.num_mini_batches  # trajectories of a planned mini-batch
    scales_up = config.algorithm.filter_groups.reweights and actor.loss_agg_mode == "token-sum"  # other modes are means
    for rows in mini_batch_rows:
        ids = owners[rows].unique()
        groups = group_ids[ids]
        weights[0, ids] = row_weights(loss_lengths[ids], groups, actor.loss_agg_mode, horizon)
        weights[1, ids] = row_weights(loss_lengths[ids], groups, "seq-mean-token-sum", horizon)
        weights[2, ids] = row_weights(num_actions[ids], groups, "token-mean", horizon)
        taught = ids[is_taught[ids]]
        weights[3, taught] = row_weights(loss_lengths[taught], group_ids[taught], actor.loss_agg_mode, horizon)
        if scales_up:
            weights[0, ids] *= full / len(ids)
    return weights


class TrainedTurn(NamedTuple):
    """Turn that is trained on, and its action tokens: token_ids[start:end] of a row."""

    turn: Turn
    row: int  # index in Trajectory.rows
    start: int
    end: int


def list_trained_turns(trajectory: Trajectory) -> list[TrainedTurn]:
    """Return the turns of the rows, in the order in which the model sampled them."""
    found = []
    for number, row in enumerate(trajectory.rows):
        turns = trajectory.turns[row.first_turn : row.first_turn + len(row.turn_ends)]
        for turn, last in zip(turns, row.turn_ends, strict=True):
            found.append(TrainedTurn(turn, number, last + 1 - len(turn.completion.token_ids), last + 1))
    return sorted(found, key=lambda one: one.turn.answer_number)
