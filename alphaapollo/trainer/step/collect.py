"""Generate the groups of one iteration. With DAPO's dynamic sampling, filter them and generate more.

stream position -> prompts -> GroupRequests -> engines -> groups (-> filter by reward variance, repeat until full)
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from alphaapollo.algorithms.group_statistics import has_variance
from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.engines.protocol import EngineError
from alphaapollo.evaluation.validation import generate_missing_groups
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.training_batch import is_trainable, is_usable
from alphaapollo.types import GroupRequest, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class CollectedGroups:
    """Groups to train on, and all groups that were generated for them."""

    groups: list[TrajectoryGroup]
    generated: list[TrajectoryGroup]
    rounds: int
    recovery: dict[str, float] = field(default_factory=dict)  # metrics of engine restarts; empty if no engine died


async def collect(run: TrainingRun, step: int, timer: Timer) -> CollectedGroups:
    """Generate `data.train_batch_size` groups, with dynamic sampling in several rounds if needed."""
    config, size = run.config, run.config.data.train_batch_size
    filters = config.algorithm.filter_groups
    generated: list[TrajectoryGroup] = []
    selected: list[TrajectoryGroup] = []
    recovery: Counter[str] = Counter()
    rounds = 0
    while rounds < (filters.max_num_gen_batches if filters.enable else 1) and len(selected) < size:
        requests = [make_request(run, draw) for draw in take_draws(run.progress, size)]
        with timer("generate"):
            groups = await generate_groups(run, requests, recovery)
        if run.reward_model_scorer:
            with timer("reward_model"):
                await run.reward_model_scorer.score_groups(groups)
        check_not_all_failed(groups)
        generated += groups
        groups = [group for group in groups if is_usable(group)]
        selected += [group for group in groups if passes_filter(run, group)]
        rounds += 1
    if filters.enable and len(selected) < size:
        run.console.notice(
            f"step {step}: only {len(selected)} of {size} groups pass the filter after {rounds} generation rounds "
            "(algorithm.filter_groups.max_num_gen_batches). Training on these groups."
        )
    return CollectedGroups(selected[:size], generated, rounds, dict(recovery))


def take_draws(progress: Progress, count: int) -> list[int]:
    """Take the stream positions of the next `count` prompts, first those of an asynchronous run's unfinished groups."""
    left, progress.unfinished = progress.unfinished[:count], progress.unfinished[count:]
    start = progress.prompts_consumed
    progress.prompts_consumed += count - len(left)
    return [*left, *range(start, progress.prompts_consumed)]


def make_request(run: TrainingRun, draw: int) -> GroupRequest:
    """Build the request for the group of the prompt at stream position `draw`."""
    (index,) = run.stream.prompt_indices(draw, 1)
    return GroupRequest(
        run.prompts[index],
        run.config.group_size,
        run.plan.sampling,
        draw=draw,
        greedy_baseline=run.plan.greedy_baseline,
    )


async def generate_groups(
    run: TrainingRun, requests: Sequence[GroupRequest], recovery: Counter[str]
) -> list[TrajectoryGroup]:
    """Generate the groups of the requests. Prefetches reference log-probs at the same time, if planned."""
    generating = _generate_with_recovery(run, requests, recovery)
    return await (run.reference.prefetch_during(generating) if run.reference else generating)


async def _generate_with_recovery(
    run: TrainingRun, requests: Sequence[GroupRequest], recovery: Counter[str]
) -> list[TrajectoryGroup]:
    """Generate groups. If engines die, replace them and generate their groups again with the same draws.

    recovery: counter of replaced engines and their groups. Raises WorkerDied if an engine cannot be replaced or dies
    again.
    """
    groups: dict[int, TrajectoryGroup] = {}
    on_end = partial(_prefetch_reference, run) if run.reference else None
    try:
        await generate_missing_groups(groups, run.workers.engines, requests, run.console, "generate", on_end)
    except WorkerDied as death:
        if run.reference:
            await run.reference.wait_until_idle()  # syncing weights to the new engine also calls the policy's workers
        recovery.update(await _replace_engines(run, death, len(requests) - len(groups)))
        await generate_missing_groups(groups, run.workers.engines, requests, run.console, "generate", on_end)
    return [groups[index] for index in range(len(requests))]


async def _replace_engines(run: TrainingRun, death: WorkerDied, missing: int) -> dict[str, int]:
    """Replace dead engines while the other workers keep their state (only without GPUs). Returns metrics.

    missing: number of groups to generate again. Raises `death` if an engine cannot be replaced; the run then restarts.
    """
    engines, trainer = run.workers.engines, run.config.trainer
    dead = sorted(engines.dead)
    if not dead or not run.workers.replaces_engines or run.engines_replaced + len(dead) > trainer.max_restarts:
        raise death
    run.engines_replaced += len(dead)
    run.console.notice(f"{death}; starting a new engine and generating {missing} groups again")
    try:
        async with asyncio.timeout(trainer.start_timeout):
            for index in dead:
                await run.workers.replace_engine(index)
    except (TimeoutError, EngineError, WorkerFailed) as error:
        run.console.notice(f"the new engine did not start: {str(error) or type(error).__name__}")
        raise death from None
    engines.dead.clear()
    await run.weights.publish(run.progress.step)
    return {"recovery/engine_restarts": len(dead), "recovery/groups_replayed": missing}


def _prefetch_reference(run: TrainingRun, group: TrajectoryGroup) -> None:
    """Prefetch reference log-probs of a finished group if it may be trained on.

    This includes every usable group that a reward model has yet to score.
    """
    assert run.reference is not None
    if is_usable(group) and (run.reward_model_scorer or passes_filter(run, group)):
        run.reference.add(group)


def passes_filter(run: TrainingRun, group: TrajectoryGroup) -> bool:
    """Whether dynamic sampling selects a usable group. Without dynamic sampling, every group passes."""
    filters = run.config.algorithm.filter_groups
    return not filters.enable or has_varied_metric(group, filters.metric)


def has_varied_metric(group: TrajectoryGroup, metric: str) -> bool:
    """Whether the metric differs between samples of the group, ignoring failed samples."""
    return has_variance([get_metric_value(one, metric) for one in group.trajectories if is_trainable(one)])


def get_metric_value(trajectory: Trajectory, metric: str) -> float:
    """Return the trajectory's value of `metric`, from algorithm.filter_groups.metric."""
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
    """Raise ValueError if all trajectories failed, as with a broken reward function or environment."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if trajectories and all(trajectory.score.outcome.failed for trajectory in trajectories):
        first = trajectories[0].score
        raise ValueError(
            f"all {len(trajectories)} trajectories of this iteration failed, so there is nothing to learn from. "
            f"The first one: {first.outcome}: {first.reason}"
        )
