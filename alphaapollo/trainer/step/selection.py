"""Select the trajectories to train on, and compute their weights in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.aggregation import overlong_filter, row_weights
from alphaapollo.algorithms.reward_shaping import filtration_weights, select_samples
from alphaapollo.algorithms.statistics import Groups
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.reward import TEACHER_SHARES
from alphaapollo.trainer.step.shaped_rewards import PromptTrajectory, sum_shaped_rewards
from alphaapollo.trainer.step.training_batch import WEIGHT_COLUMNS, OtherSamples
from alphaapollo.types import LONGER_PROMPT, Row, Trajectory, TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed


def is_trainable(trajectory: Trajectory) -> bool:
    """Whether the trajectory can be trained on: its score did not fail, and the model sampled at least one token."""
    return not trajectory.score.outcome.failed and bool(trajectory.rows)


def is_usable_for_training(group: TrajectoryGroup) -> bool:
    """Whether at least one sample of the group can be trained on, and its greedy baseline (if any) did not fail."""
    is_baseline_usable = group.baseline is None or not group.baseline.score.outcome.failed
    return is_baseline_usable and any(is_trainable(trajectory) for trajectory in group.trajectories)


def select_trajectories(
    groups: Sequence[TrajectoryGroup], config: Config, step: int
) -> tuple[list[PromptTrajectory], Tensor, OtherSamples]:
    """Select the samples of each group to train on: those that can be trained on, or some of them
    (algorithm.filtration). Returns them with their group indices, and those other samples that the baseline includes
    (filtration.baseline=all).
    """
    assert all(is_usable_for_training(group) for group in groups), "collect_groups() must drop unusable groups"
    pairs: list[PromptTrajectory] = []
    indices: list[int] = []
    for index, group in enumerate(groups):
        trainable = [(group.prompt, trajectory) for trajectory in group.trajectories if is_trainable(trajectory)]
        pairs += trainable
        indices += [index] * len(trainable)
    num_failed = sum(len(group.trajectories) for group in groups) - len(pairs)
    group_ids, filtration = torch.tensor(indices), config.algorithm.filtration
    if not filtration.selects:
        return pairs, group_ids, OtherSamples(num_failed, [], torch.empty(0, dtype=torch.float64), group_ids[:0])
    assert filtration.size is not None
    scores = sum_shaped_rewards(pairs, config)
    seeds = (
        derive_seed(config.trainer.seed, "filtration", step, sample.prompt_id, sample.sample) for _, sample in pairs
    )
    noise = torch.tensor([np.random.default_rng(seed).random() for seed in seeds])
    selected = select_samples(scores, Groups.from_ids(group_ids), filtration.size, filtration.method, noise)
    kept = [pair for pair, is_selected in zip(pairs, selected, strict=True) if is_selected]
    is_other = ~selected if filtration.baseline == "all" else torch.zeros_like(selected)
    trajectories = [trajectory for (_, trajectory), other in zip(pairs, is_other, strict=True) if other]
    return kept, group_ids[selected], OtherSamples(num_failed, trajectories, scores[is_other], group_ids[is_other])


def list_rows(pairs: Sequence[PromptTrajectory], config: Config) -> tuple[list[Trajectory], list[Row], Tensor]:
    """Return all trajectories, their rows, and the trajectory of each row, [B].

    With teacher.models, each row also gets the weights of the teachers for its data source.
    """
    rows: list[Row] = []
    has_teachers = bool(config.teacher.models)
    for prompt, trajectory in pairs:
        columns = {TEACHER_SHARES: config.teacher.find_shares(prompt.data_source)} if has_teachers else {}
        rows += [replace(row, columns=row.columns | columns) for row in trajectory.rows] if columns else trajectory.rows
    owners = [owner for owner, (_, trajectory) in enumerate(pairs) for _ in trajectory.rows]
    return [trajectory for _, trajectory in pairs], rows, torch.tensor(owners)


def compute_loss_weights(
    trajectories: Sequence[Trajectory],
    num_actions: Tensor,
    scores: Tensor,
    mini_batch_rows: Sequence[list[int]],
    owners: Tensor,
    group_ids: Tensor,
    config: Config,
) -> dict[str, np.ndarray]:
    """Compute the loss weights of the N trajectories in their mini-batches (of all ranks), as WEIGHT_COLUMNS [B].

    The four columns are for the token-level policy loss, the sequence-level policy loss, the critic's loss (a mean over
    tokens), and the divergence from a teacher. The last one is like the first, but over trajectories with a teacher:
    a self-teacher needs a row with a longer prompt.

    Args:
        num_actions, scores, group_ids: [N].
        mini_batch_rows: rows of each mini-batch. owners: [B], trajectory of each row.
    """
    actor, filtration = config.actor_rollout_ref.actor, config.algorithm.filtration
    all_are_taught = not config.teacher.uses_self_teacher
    has_longer_prompt = [any(LONGER_PROMPT in row.columns for row in trajectory.rows) for trajectory in trajectories]
    is_taught = torch.tensor([all_are_taught or has_prompt for has_prompt in has_longer_prompt])
    is_cut = torch.tensor([config.algorithm.overlong_filter and trajectory.truncated for trajectory in trajectories])
    loss_lengths = overlong_filter(num_actions.unsqueeze(1), is_cut).squeeze(1)
    weights, horizon = torch.zeros(4, len(trajectories), dtype=torch.float64), config.loss_horizon
    planned_size = config.trajectories_per_update / config.num_mini_batches  # planned trajectories of a mini-batch
    scales_up = config.algorithm.filter_groups.reweights and actor.loss_agg_mode == "token-sum"  # other modes are means
    for rows in mini_batch_rows:
        ids = owners[rows].unique()
        groups, taught = group_ids[ids], ids[is_taught[ids]]
        weights[0, ids] = row_weights(loss_lengths[ids], groups, actor.loss_agg_mode, horizon)
        weights[1, ids] = row_weights(loss_lengths[ids], groups, "seq-mean-token-sum", horizon)
        weights[2, ids] = row_weights(num_actions[ids], groups, "token-mean", horizon)
        weights[3, taught] = row_weights(loss_lengths[taught], group_ids[taught], actor.loss_agg_mode, horizon)
        if scales_up:
            weights[0, ids] *= planned_size / len(ids)
    if (method := filtration.method) in ("best", "best_random", "best_worst"):
        weights *= filtration_weights(scores, Groups.from_ids(group_ids), method)
    return dict(zip(WEIGHT_COLUMNS, weights[:, owners].numpy(), strict=True))
