"""Build the training batch of one iteration from rollout groups.

groups -> select trajectories -> assign their rows to ranks and micro-batches -> rewards, turns and loss weights
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import Turns, get_estimator
from alphaapollo.algorithms.mismatch import needs_full_sequence
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.config.schema import Actor, Algorithm, Config
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.trainer.step.selection import compute_loss_weights, select_trajectories
from alphaapollo.trainer.step.shaped_rewards import (
    PromptTrajectory,
    TrainedTurn,
    compute_greedy_rewards,
    compute_length_penalty,
    get_reward_components,
    list_trained_turns,
    place_rewards,
)
from alphaapollo.trainer.step.training_batch import WEIGHTS, TrainingBatch, sum_spans
from alphaapollo.types import Row, Trajectory, TrajectoryGroup, Turn
from alphaapollo.utils.seeds import derive_seed


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
    pairs, group_of, unselected = select_trajectories(groups, config, step)
    trajectories, rows, owners = _list_rows(pairs, config)
    policy_loss = get_policy_loss(actor.policy_loss.loss_mode)
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
    turns = list_trained_turns(trajectories, layout.response_offsets)
    rewards = place_rewards(pairs, turns, len(mask), config)
    scores = sum_spans(rewards, offsets)
    weights = compute_loss_weights(trajectories, num_actions, scores, layout.mini_batch_rows, owners, group_of, config)
    order = draw_token_order(trajectories, turns, len(mask), seed, step) if policy_loss.select_tokens else None
    return TrainingBatch(
        rows=rows,
        layout=layout,
        trajectories=trajectories,
        group_ids=group_of[owners],
        trajectory_ids=owners,
        trajectory_offsets=offsets,
        mask=mask,
        num_actions=num_actions,
        token_rewards=rewards,
        components=get_reward_components([*trajectories, *unselected.trajectories]),
        greedy_rewards=compute_greedy_rewards(groups, config, group_of[owners]),
        length_penalty=compute_length_penalty(trajectories, scores, config),
        **dict(zip(WEIGHTS, weights[:, owners].numpy(), strict=True)),
        turns=number_turns(turns, group_of.tolist(), mask) if _needs_turns(trajectories, algorithm) else None,
        token_order_keys=order,
        unselected=unselected,
    )


def _list_rows(pairs: Sequence[PromptTrajectory], config: Config) -> tuple[list[Trajectory], list[Row], Tensor]:
    """Return all trajectories, their rows, and the trajectory of each row, [B].

    The rows have the weights of the teachers of their data source if there are several.
    """
    rows: list[Row] = []
    for prompt, trajectory in pairs:
        columns = {TEACHER_SHARES: config.teacher.find_shares(prompt.data_source)} if config.teacher.models else {}
        rows += [replace(row, columns=row.columns | columns) if columns else row for row in trajectory.rows]
    owners = [owner for owner, (_, trajectory) in enumerate(pairs) for _ in trajectory.rows]
    return [trajectory for _, trajectory in pairs], rows, torch.tensor(owners)


def _get_unsplittable_group_ids(trajectory_group_ids: Tensor, actor: Actor, algorithm: Algorithm) -> list[int] | None:
    """Return the group index 0 .. G-1 of each trajectory if a group must stay in one mini-batch, else None.

    Estimators that normalize over a mini-batch and group-mean-token-mean aggregation require this."""
    by_mini_batch = "mini_batches" in get_estimator(algorithm.adv_estimator).needs
    if not by_mini_batch and actor.loss_agg_mode != "group-mean-token-mean":
        return None
    numbers: list[int] = torch.unique(trajectory_group_ids, return_inverse=True)[1].tolist()
    return numbers


def _needs_turns(trajectories: Sequence[Trajectory], algorithm: Algorithm) -> bool:
    """Whether the estimator compares turns, or needs the order in time of the rows of a trajectory."""
    estimator = get_estimator(algorithm.adv_estimator)
    return "turns" in estimator.needs or (estimator.per_token and any(len(each.rows) > 1 for each in trajectories))


def number_turns(turns_by_trajectory: Sequence[list[TrainedTurn]], group_ids: Sequence[int], mask: np.ndarray) -> Turns:
    """Number the trained turns of a batch in the order of sampling, and find turns that start from the same state.

    Args:
        turns_by_trajectory: N lists. group_ids: [N], equal ones are consecutive.
        mask: [n], 1 on action tokens.

    Returns turns whose turn_of_token is [n].
    """
    turn_of_token = np.full(len(mask), -1)
    owners: list[int] = []
    anchor_ids: list[int] = []
    anchors: dict[Hashable, int] = {}  # of one group, because the keys may be long
    num_anchors = 0
    for owner, turns in enumerate(turns_by_trajectory):
        if owner and group_ids[owner] != group_ids[owner - 1]:
            num_anchors, anchors = num_anchors + len(anchors), {}
        for turn, start, end in turns:
            turn_of_token[start:end] = len(owners)
            owners.append(owner)
            anchor_ids.append(num_anchors + anchors.setdefault(_get_anchor_state(turn), len(anchors)))
    turn_of_token[mask == 0] = -1
    return Turns(torch.from_numpy(turn_of_token), torch.tensor(owners), torch.tensor(anchor_ids))


def _get_anchor_state(turn: Turn) -> Hashable:
    """Return the environment's state before a turn: StepResult.info["state"], else the turn's context tokens."""
    state = turn.info.get("state")
    return tuple(turn.context_ids) if state is None else repr(state)


def draw_token_order(
    trajectories: Sequence[Trajectory], turns: Sequence[list[TrainedTurn]], num_tokens: int, run_seed: int, step: int
) -> np.ndarray:
    """Draw a random number in [0, 1) per action token. Returns [n]. Each trajectory has a seed of its own."""
    noise = np.zeros(num_tokens)
    for trajectory, trained in zip(trajectories, turns, strict=True):
        seed = derive_seed(run_seed, "choice", step, trajectory.prompt_id, trajectory.sample)
        generator = np.random.default_rng(seed)
        for _, start, end in trained:
            noise[start:end] = generator.random(end - start)
    return noise
