"""Generate the rollout groups (all samples of one prompt) of an iteration. With DAPO's dynamic sampling, groups without
reward variance are dropped, and more groups are generated until the batch is full.

With data.reuse, an iteration trains again on recent groups, a bounded buffer. A group stays complete: its
advantages are computed from its own samples, and its tokens keep the log-probs of the engine that sampled them.
algorithm.rollout_correction weights them by the current policy, like those of late groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alphaapollo.algorithms.group_statistics import has_variance
from alphaapollo.config.schema import Data
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.progress import Progress, RecentGroups
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.training_batch import is_trainable, is_usable_for_training
from alphaapollo.types import GroupRequest, Trajectory, TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed


@dataclass(frozen=True)
class CollectedGroups:
    """Rollout groups of an iteration: those to train on, and all groups that were generated to get them."""

    selected: list[TrajectoryGroup]
    generated: list[TrajectoryGroup]
    rounds: int  # generation rounds; more than one only with dynamic sampling
    reused: list[TrajectoryGroup] = field(default_factory=list)  # of earlier iterations, to train on again
    recent: RecentGroups = field(default_factory=RecentGroups)  # for later iterations
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def trained(self) -> list[TrajectoryGroup]:
        """All groups to train on, those of this iteration first."""
        return [*self.selected, *self.reused]


async def collect_groups(run: TrainingRun, iteration: int, timer: Timer) -> CollectedGroups:
    """Generate the data.train_batch_size groups of an iteration. Dynamic sampling may need several rounds."""
    config, size = run.config, run.config.data.train_batch_size
    filters = config.algorithm.filter_groups
    generated: list[TrajectoryGroup] = []
    selected: list[TrajectoryGroup] = []
    rounds = 0
    while rounds < (filters.max_num_gen_batches if filters.enable else 1) and len(selected) < size:
        requests = make_group_requests(run, take_stream_positions(run.progress, size))
        with timer("generate"):
            groups = await generate_groups(run, requests)
        if run.reward_model_scorer:
            with timer("reward_model"):
                await run.reward_model_scorer.score_groups(groups)
        check_not_all_failed(groups)
        generated += groups
        groups = [group for group in groups if is_usable_for_training(group)]
        selected += [group for group in groups if passes_dynamic_sampling(run, group)]
        rounds += 1
    if filters.enable and len(selected) < size:
        run.console.notify(
            f"step {iteration}: training on {len(selected)} instead of {size} groups, because only these have reward "
            f"variance after {rounds} generation rounds (limit: algorithm.filter_groups.max_num_gen_batches)"
        )
    collected = CollectedGroups(selected[:size], generated, rounds)
    return add_recent_groups(run.progress.recent, iteration, collected, config.data)


def take_stream_positions(progress: Progress, count: int) -> list[int]:
    """Return the positions of the next `count` prompts in the stream of training prompts, and advance `progress`.
    Positions of groups that an asynchronous run has not finished come first."""
    left, progress.unfinished = progress.unfinished[:count], progress.unfinished[count:]
    start = progress.prompts_consumed
    progress.prompts_consumed += count - len(left)
    return [*left, *range(start, progress.prompts_consumed)]


def make_group_requests(run: TrainingRun, positions: Sequence[int]) -> list[GroupRequest]:
    """Build the requests for all samples of the prompts at these positions in the stream of training prompts."""
    indices = run.sampler.choose_prompts(run.progress, positions)
    return [
        GroupRequest(
            run.prompts[index],
            run.config.group_size,
            run.plan.sampling,
            stream_position=position,
            greedy_baseline=run.plan.greedy_baseline,
        )
        for index, position in zip(indices, positions, strict=True)
    ]


async def generate_groups(run: TrainingRun, requests: Sequence[GroupRequest]) -> list[TrajectoryGroup]:
    """Generate the groups on all engines at once, in the order of the requests. Raises WorkerDied if an engine dies."""
    groups: dict[int, TrajectoryGroup] = {}
    run.console.show_phase("generate", 0, len(requests))
    async for index, group in run.workers.engines.generate(requests):
        groups[index] = group
        run.console.show_phase("generate", len(groups), len(requests))
    return [groups[index] for index in range(len(requests))]


def passes_dynamic_sampling(run: TrainingRun, group: TrajectoryGroup) -> bool:
    """Whether dynamic sampling (algorithm.filter_groups) is disabled or keeps the group, which must be usable."""
    filters = run.config.algorithm.filter_groups
    return not filters.enable or has_metric_variance(group, filters.metric)


def has_metric_variance(group: TrajectoryGroup, metric: str) -> bool:
    """Whether the metric differs between the samples of the group. Failed samples are ignored."""
    return has_variance([get_metric_value(one, metric) for one in group.trajectories if is_trainable(one)])


def get_metric_value(trajectory: Trajectory, metric: str) -> float:
    """Return the trajectory's value of a metric: accuracy, reward, or the name of a reward component."""
    if metric in ("accuracy", "reward"):
        return trajectory.accuracy if metric == "accuracy" else trajectory.reward
    value = trajectory.score.component(metric)
    if math.isnan(value):
        available = {"accuracy", "reward", *trajectory.score.components}
        raise ValueError(
            f"algorithm.filter_groups.metric={metric!r} is not a component of the reward. Set it to one of: "
            f"{', '.join(sorted(available))}."
        )
    return value


def check_not_all_failed(groups: Sequence[TrajectoryGroup]) -> None:
    """Raise ValueError if no trajectory can be trained on, e.g. because the reward function is broken."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if trajectories and not any(map(is_trainable, trajectories)):
        first = trajectories[0].score
        raise ValueError(
            f"all {len(trajectories)} trajectories of this iteration failed, so there is nothing to learn from. "
            f"First failure ({first.outcome}): {first.reason}"
        )


def add_recent_groups(recent: RecentGroups, iteration: int, collected: CollectedGroups, data: Data) -> CollectedGroups:
    """Choose the groups of earlier iterations that this iteration trains on again (data.reuse), and keep its own
    groups for later ones.

    Only groups with different rewards are kept, because the others have no advantages.
    """
    if not data.reuse.groups:
        return collected
    kept = [(origin, group) for origin, group in recent.entries if iteration - origin <= data.reuse.max_age]
    rng = np.random.default_rng(derive_seed(data.seed, "reuse", iteration))
    chosen = [kept[index] for index in sorted(rng.permutation(len(kept))[: data.reuse.groups])]
    added = [(iteration, group) for group in collected.selected if has_metric_variance(group, "reward")]
    ages = [iteration - origin for origin, _ in chosen]
    metrics = {"reuse/groups": float(len(chosen)), "reuse/age": float(np.mean(ages)) if ages else 0.0}
    reused, metrics = [group for _, group in chosen], collected.metrics | metrics
    return replace(collected, reused=reused, recent=RecentGroups((*kept, *added)), metrics=metrics)
