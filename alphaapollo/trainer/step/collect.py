"""One iteration's rollouts: generate, and where DAPO's dynamic sampling is on, filter and refill.

stream position -> prompts -> GroupRequests -> engines -> groups (-> keep those with a signal, again until full)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from alphaapollo.algorithms.dynamic_sampling import keep_group
from alphaapollo.controller.ranks import WorkerDied
from alphaapollo.evaluation.playing import generate_missing
from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.engine_deaths import replace_engines
from alphaapollo.trainer.progress import Progress
from alphaapollo.trainer.run_state import Run
from alphaapollo.trainer.step.training_batch import trainable, usable
from alphaapollo.types import GroupRequest, Trajectory, TrajectoryGroup


@dataclass(frozen=True)
class Collected:
    """The groups to train on, and all that were generated on the way."""

    groups: list[TrajectoryGroup]
    generated: list[TrajectoryGroup]
    rounds: int
    recovery: dict[str, float] = field(default_factory=dict)  # metrics, where an engine has died


async def collect(run: Run, step: int, timer: Timer) -> Collected:
    """Generate until `data.train_batch_size` groups stand: one round, or with dynamic sampling as many as it takes."""
    config, size = run.config, run.config.data.train_batch_size
    filters = config.algorithm.filter_groups
    generated: list[TrajectoryGroup] = []
    kept: list[TrajectoryGroup] = []
    recovery: Counter[str] = Counter()
    rounds = 0
    while rounds < (filters.max_num_gen_batches if filters.enable else 1) and len(kept) < size:
        requests = [request_of(run, draw) for draw in next_draws(run.progress, size)]
        with timer("generate"):
            groups = await play(run, requests, recovery)
        if run.trained_reward:
            with timer("reward_model"):
                await run.trained_reward.add_to(groups)
        check_not_all_failed(groups)
        generated += groups
        groups = [group for group in groups if usable(group)]
        kept += [group for group in groups if stays(run, group)]
        rounds += 1
    if filters.enable and len(kept) < size:
        run.console.notice(
            f"step {step}: {len(kept)} of {size} groups have a signal after {rounds} generation rounds "
            "(algorithm.filter_groups.max_num_gen_batches); training on those."
        )
    return Collected(kept[:size], generated, rounds, dict(recovery))


def next_draws(progress: Progress, count: int) -> list[int]:
    """The next prompts, by their positions in the stream. What an asynchronous run has left unfinished comes first."""
    left, progress.unfinished = progress.unfinished[:count], progress.unfinished[count:]
    start = progress.prompts_consumed
    progress.prompts_consumed += count - len(left)
    return [*left, *range(start, progress.prompts_consumed)]


def request_of(run: Run, draw: int) -> GroupRequest:
    """The group of the prompt at a position in the stream."""
    (index,) = run.stream.indices(draw, 1)
    return GroupRequest(
        run.prompts[index],
        run.config.group_size,
        run.plan.sampling,
        draw=draw,
        greedy_baseline=run.plan.greedy_baseline,
    )


def stays(run: Run, group: TrajectoryGroup) -> bool:
    """Dynamic sampling, where it is on, has a use for a usable group."""
    filters = run.config.algorithm.filter_groups
    return not filters.enable or has_signal(group, filters.metric)


async def play(run: Run, requests: Sequence[GroupRequest], recovery: Counter[str]) -> list[TrajectoryGroup]:
    """The requests' groups; the plan may have the reference look at those that have ended while others are played."""
    playing = play_all(run, requests, recovery)
    return await (run.reference.beside(playing) if run.reference else playing)


async def play_all(run: Run, requests: Sequence[GroupRequest], recovery: Counter[str]) -> list[TrajectoryGroup]:
    """The requests' groups. Where an engine dies over them, another one takes its place, and what it has not played is
    played again, with the same draws; `recovery` counts that. Raises WorkerDied where that cannot be, or does not
    help."""
    groups: dict[int, TrajectoryGroup] = {}
    ended = partial(has_ended, run) if run.reference else None
    try:
        await generate_missing(groups, run.crew.engines, requests, run.console, "generate", ended)
    except WorkerDied as death:
        if run.reference:
            await run.reference.settle()  # the new engine's publish is a matter of the policy's workers, too
        recovery.update(await replace_engines(run, death, len(requests) - len(groups)))
        await generate_missing(groups, run.crew.engines, requests, run.console, "generate", ended)
    return [groups[index] for index in range(len(requests))]


def has_ended(run: Run, group: TrajectoryGroup) -> None:
    """The reference may look at it, if it is going to be trained on; before a reward model has, that is not known."""
    assert run.reference is not None
    if usable(group) and (run.trained_reward or stays(run, group)):
        run.reference.add(group)


def metric_of(trajectory: Trajectory, metric: str) -> float:
    """The value that algorithm.filter_groups.metric names."""
    if metric in ("accuracy", "reward"):
        return trajectory.accuracy if metric == "accuracy" else trajectory.reward
    value = trajectory.score.component(metric)
    if math.isnan(value):
        named = {"accuracy", "reward", *trajectory.score.components}
        raise ValueError(
            f"algorithm.filter_groups.metric={metric!r} is no component of the reward, which has: "
            f"{', '.join(sorted(named))}."
        )
    return value


def has_signal(group: TrajectoryGroup, metric: str) -> bool:
    """Do the group's samples differ in the metric? Failed trajectories have none."""
    return keep_group([metric_of(one, metric) for one in group.trajectories if trainable(one)])


def check_not_all_failed(groups: Sequence[TrajectoryGroup]) -> None:
    """A broken reward function or environment shows in the first batch: stop there, with its reason."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if trajectories and all(trajectory.score.outcome.failed for trajectory in trajectories):
        first = trajectories[0].score
        raise ValueError(
            f"all {len(trajectories)} trajectories of this iteration failed, so there is nothing to learn from. "
            f"The first: {first.outcome}: {first.reason}"
        )
