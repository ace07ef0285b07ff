"""Generate the rollout groups (all samples of one prompt) of an iteration. With DAPO's dynamic sampling, groups without
reward variance are dropped, and more groups are generated until the batch is full.

With data.reuse, an iteration trains again on recent groups, a bounded replay buffer. A group stays complete: its
advantages are computed from its own samples, and its tokens keep the log-probs of the engine that sampled them.
algorithm.rollout_correction weights them by the current policy, like those of late groups.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from alphaapollo.algorithms.group_statistics import has_variance
from alphaapollo.config.schema import Data
from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.engines.protocol import EngineError
from alphaapollo.evaluation.validation import generate_missing_groups
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.progress import Progress, RecentGroups
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.training_batch import is_trainable, is_usable_for_training
from alphaapollo.types import GroupRequest, Trajectory, TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed


@dataclass(frozen=True)
class CollectedGroups:
    """Rollout groups to train on, and all groups that were generated to get them."""

    selected: list[TrajectoryGroup]
    generated: list[TrajectoryGroup]
    rounds: int  # generation rounds; more than one only with dynamic sampling
    recovery_metrics: dict[str, float] = field(default_factory=dict)  # empty if no engine was restarted


async def collect_groups(run: TrainingRun, step: int, timer: Timer) -> CollectedGroups:
    """Generate the data.train_batch_size groups of an iteration. Dynamic sampling may need several rounds."""
    config, size = run.config, run.config.data.train_batch_size
    filters = config.algorithm.filter_groups
    generated: list[TrajectoryGroup] = []
    selected: list[TrajectoryGroup] = []
    recovery_counts: Counter[str] = Counter()
    rounds = 0
    while rounds < (filters.max_num_gen_batches if filters.enable else 1) and len(selected) < size:
        requests = make_group_requests(run, take_stream_positions(run.progress, size))
        with timer("generate"):
            groups = await generate_groups(run, requests, recovery_counts)
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
            f"step {step}: training on {len(selected)} instead of {size} groups, because only these have reward "
            f"variance after {rounds} generation rounds (limit: algorithm.filter_groups.max_num_gen_batches)"
        )
    return CollectedGroups(selected[:size], generated, rounds, dict(recovery_counts))


def take_stream_positions(progress: Progress, count: int) -> list[int]:
    """Return the positions of the next `count` prompts in the stream of training prompts, and advance `progress`.
    Positions of groups that an asynchronous run has not finished come first."""
    left, progress.unfinished = progress.unfinished[:count], progress.unfinished[count:]
    start = progress.prompts_consumed
    progress.prompts_consumed += count - len(left)
    return [*left, *range(start, progress.prompts_consumed)]


def make_group_requests(run: TrainingRun, positions: Sequence[int]) -> list[GroupRequest]:
    """Build the requests for all samples of the prompts at these positions in the stream of training prompts."""
    if run.curriculum:
        indices = run.curriculum.choose_prompts(run.progress, positions)
    else:
        indices = [index for position in positions for index in run.stream.prompt_indices(position, 1)]
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


async def generate_groups(
    run: TrainingRun, requests: Sequence[GroupRequest], recovery_counts: Counter[str]
) -> list[TrajectoryGroup]:
    """Generate groups. If engines die, replace them and generate their groups again with the same random seeds.

    Raises WorkerDied if an engine cannot be replaced or dies again. Adds numbers of restarts to `recovery_counts`.
    """
    groups: dict[int, TrajectoryGroup] = {}
    try:
        await generate_missing_groups(groups, run.workers.engines, requests, run.console, "generate")
    except WorkerDied as death:
        recovery_counts.update(await _replace_dead_engines(run, death, len(requests) - len(groups)))
        await generate_missing_groups(groups, run.workers.engines, requests, run.console, "generate")
    return [groups[index] for index in range(len(requests))]


async def _replace_dead_engines(run: TrainingRun, death: WorkerDied, num_missing_groups: int) -> dict[str, int]:
    """Replace dead engines without a restart of the other workers, which is possible only on CPUs. Returns metrics.

    Raises `death` if an engine cannot be replaced; the run then restarts from its last checkpoint.
    """
    engines, trainer = run.workers.engines, run.config.trainer
    dead = sorted(engines.dead)
    if not dead or not run.workers.can_replace_engines or run.engines_replaced + len(dead) > trainer.max_restarts:
        raise death
    run.engines_replaced += len(dead)
    run.console.notify(f"{death}; starting a new engine and generating {num_missing_groups} groups again")
    try:
        async with asyncio.timeout(trainer.start_timeout):
            for index in dead:
                await run.workers.replace_engine(index)
    except (TimeoutError, EngineError, WorkerFailed) as error:
        run.console.notify(f"the new engine did not start: {str(error) or type(error).__name__}")
        raise death from None
    engines.dead.clear()
    await run.weights.publish(run.progress.step)
    return {"recovery/engine_restarts": len(dead), "recovery/groups_replayed": num_missing_groups}


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


def take_recent_groups(
    progress: Progress, step: int, fresh: Sequence[TrajectoryGroup], data: Data
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """Choose the groups of earlier iterations that iteration `step` trains on again, and add `fresh` for later ones.

    Only groups with different rewards are kept, because the others have no advantages. Returns groups and metrics.
    """
    if not data.reuse.groups:
        progress.recent = RecentGroups()
        return [], {}
    kept = [(origin, group) for origin, group in progress.recent.entries if step - origin <= data.reuse.max_age]
    rng = np.random.default_rng(derive_seed(data.seed, "reuse", step))
    chosen = [kept[index] for index in sorted(rng.permutation(len(kept))[: data.reuse.groups])]
    added = [(step, group) for group in fresh if has_metric_variance(group, "reward")]
    progress.recent = RecentGroups((*kept, *added))
    ages = [step - origin for origin, _ in chosen]
    metrics = {"reuse/groups": float(len(chosen)), "reuse/age": float(np.mean(ages)) if ages else 0.0}
    return [group for _, group in chosen], metrics
