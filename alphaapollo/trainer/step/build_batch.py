"""Build the training batch of one iteration from rollout groups.

groups -> select trajectories -> assign their rows to ranks and micro-batches -> rewards, turns and loss weights
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.mismatch import needs_full_sequence
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.config.schema import Actor, Algorithm, Config
from alphaapollo.trainer.step.selection import compute_loss_weights, list_rows, select_trajectories
from alphaapollo.trainer.step.shaped_rewards import (
    compute_greedy_rewards,
    compute_length_penalty,
    get_reward_components,
    place_rewards,
)
from alphaapollo.trainer.step.training_batch import TrainingBatch, sum_per_trajectory
from alphaapollo.trainer.step.turns import draw_token_order, list_trained_turns, number_turns
from alphaapollo.types import Trajectory, TrajectoryGroup
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
    """Flatten groups into rows (token sequences), assign the rows to ranks, and compute rewards and loss weights.

    Args:
        max_tokens: token budget of a micro-batch on each of the num_ranks data-parallel ranks.
        padded: micro-batches are padded to their longest row; padding counts in the token budget.
        uses_shared_prompts: compute the common prefix of a group's rows once, if this saves enough tokens.
    """
    actor, algorithm, seed = config.actor_rollout_ref.actor, config.algorithm, config.trainer.seed
    pairs, group_of, others = select_trajectories(groups, config, step)
    trajectories, rows, owners = list_rows(pairs, config)
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
    num_actions = _count_actions(mask, offsets)
    turns = list_trained_turns(trajectories, layout.response_offsets)
    token_order = draw_token_order(trajectories, turns, len(mask), seed, step) if policy_loss.select_tokens else None
    rewards = place_rewards(pairs, turns, len(mask), config)
    scores = sum_per_trajectory(rewards, offsets)
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
        scores=scores,
        components=get_reward_components([*trajectories, *others.trajectories]),
        greedy_rewards=compute_greedy_rewards(groups, config, group_of[owners]),
        length_penalty=compute_length_penalty(trajectories, scores, config),
        **compute_loss_weights(trajectories, num_actions, scores, layout.mini_batch_rows, owners, group_of, config),
        turns=number_turns(turns, group_of.tolist(), mask) if _needs_turns(trajectories, algorithm) else None,
        token_order_keys=token_order,
        others=others,
    )


def _get_unsplittable_group_ids(trajectory_group_ids: Tensor, actor: Actor, algorithm: Algorithm) -> list[int] | None:
    """Return the group index 0 .. G-1 of each trajectory if a group must stay in one mini-batch, else None.

    Estimators that normalize over a mini-batch and group-mean-token-mean aggregation require this."""
    normalizes_mini_batches = "mini_batches" in get_estimator(algorithm.adv_estimator).needs
    if not normalizes_mini_batches and actor.loss_agg_mode != "group-mean-token-mean":
        return None
    numbers: list[int] = torch.unique(trajectory_group_ids, return_inverse=True)[1].tolist()
    return numbers


def _needs_turns(trajectories: Sequence[Trajectory], algorithm: Algorithm) -> bool:
    """Whether the estimator compares turns, or needs the order in time of the rows of a trajectory."""
    estimator = get_estimator(algorithm.adv_estimator)
    return "turns" in estimator.needs or (estimator.per_token and any(len(each.rows) > 1 for each in trajectories))


def _count_actions(mask: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
    """Count the action tokens of each trajectory: its response tokens minus those of observations (few or none)."""
    observations = np.flatnonzero(mask == 0)
    return torch.from_numpy(np.diff(offsets - np.searchsorted(observations, offsets))).double()
