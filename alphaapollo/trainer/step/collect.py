"""Generate the rollout groups (all samples of one prompt) of an iteration, or with trainer.async_mode of later ones.

With DAPO's dynamic sampling, groups without reward variance are dropped, and more groups are generated until the batch
is full (filter_groups.mode=refill), or the loss is scaled up instead (reweight, selection.py).

With data.reuse, an iteration trains again on groups from a bounded buffer of recent ones. A group stays complete: its
advantages are computed from its own samples, and its tokens keep the log-probs of the engine that sampled them.
algorithm.rollout_correction corrects for their older weights, as for the groups of an asynchronous run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alphaapollo.algorithms.statistics import has_variance
from alphaapollo.controller.errors import EngineCoreDied
from alphaapollo.observability.timing import Timer
from alphaapollo.session.progress import Progress, RecentGroups
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.selection import is_trainable, is_usable_for_training
from alphaapollo.types import GroupRequest, Trajectory, TrajectoryGroup
from alphaapollo.utils.seeds import derive_seed


@dataclass(frozen=True)
class CollectedGroups:
    """Rollout groups of an iteration: those to train on, and all groups that were generated to get them."""

    selected: list[TrajectoryGroup]
    generated: list[TrajectoryGroup]
    rounds: int  # generation rounds; more than one only with dynamic sampling
    reused: list[TrajectoryGroup] = field(default_factory=list)  # groups of earlier iterations to train on again
    recent: RecentGroups = field(default_factory=RecentGroups)  # groups that later iterations may reuse
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
    while rounds < filters.max_rounds and len(selected) < size:
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
    if filters.enable and filters.mode == "refill" and len(selected) < size:
        notify_incomplete_batch(run, iteration, len(selected))
    collected = CollectedGroups(selected[:size], generated, rounds)
    return add_recent_groups(run, iteration, collected)


def take_stream_positions(progress: Progress, count: int) -> list[int]:
    """Return the positions of the next `count` prompts in the stream of training prompts, and advance `progress`.
    Positions of groups that an asynchronous run has not finished come first."""
    unfinished, progress.unfinished = progress.unfinished[:count], progress.unfinished[count:]
    start = progress.prompts_consumed
    progress.prompts_consumed += count - len(unfinished)
    return [*unfinished, *range(start, progress.prompts_consumed)]


def make_group_requests(run: TrainingRun, positions: Sequence[int]) -> list[GroupRequest]:
    """Build the requests for all samples of the prompts at these positions in the stream of training prompts."""
    indices, size, plan = run.sampler.choose_prompts(run.progress, positions), run.config.group_size, run.plan
    return [
        GroupRequest(run.prompts[index], size, plan.sampling, position, greedy_baseline=plan.greedy_baseline)
        for index, position in zip(indices, positions, strict=True)
    ]


async def generate_groups(run: TrainingRun, requests: Sequence[GroupRequest]) -> list[TrajectoryGroup]:
    """Generate the groups on all engines at once, in the order of the requests."""
    groups: dict[int, TrajectoryGroup] = {}
    run.console.show_phase("generate", 0, len(requests))
    async for index, group in run.workers.engines.generate(requests):
        groups[index] = group
        run.console.count_tokens([group])
        run.console.show_phase("generate", len(groups), len(requests))
    return [groups[index] for index in range(len(requests))]


def passes_dynamic_sampling(run: TrainingRun, group: TrajectoryGroup) -> bool:
    """Whether dynamic sampling (algorithm.filter_groups) is disabled or keeps the group, which must be usable."""
    filters = run.config.algorithm.filter_groups
    return not filters.enable or has_metric_variance(group, filters.metric)


def has_metric_variance(group: TrajectoryGroup, metric: str) -> bool:
    """Whether the metric differs between the samples of the group. Failed samples are ignored."""
    return has_variance([get_metric_value(sample, metric) for sample in group.trajectories if is_trainable(sample)])


def get_metric_value(trajectory: Trajectory, metric: str) -> float:
    """Return the trajectory's value of a metric: accuracy, reward, or the name of a reward component."""
    if metric == "reward":
        return trajectory.reward
    value = trajectory.accuracy if metric == "accuracy" else trajectory.score.component(metric)
    if value is None or math.isnan(value):
        accuracy = [] if trajectory.accuracy is None else ["accuracy"]
        available = {"reward", *accuracy, *trajectory.score.components}
        raise ValueError(
            f"algorithm.filter_groups.metric={metric!r} is not a component of the reward. Set it to one of: "
            f"{', '.join(sorted(available))}."
        )
    return value


def notify_incomplete_batch(run: TrainingRun, iteration: int, count: int) -> None:
    filters, size = run.config.algorithm.filter_groups, run.config.data.train_batch_size
    why = "have no reward variance (algorithm.filter_groups.max_num_gen_batches)" if filters.enable else "failed"
    run.console.notify(f"step {iteration}: training on {count} instead of {size} groups, because too many others {why}")


def check_not_all_failed(groups: Sequence[TrajectoryGroup]) -> None:
    """Raise ValueError if no group can be trained on, e.g. because the reward function is broken."""
    if groups and not any(map(is_usable_for_training, groups)):
        first = groups[0]
        failed_baseline = first.baseline if any(map(is_trainable, first.trajectories)) else None  # else samples failed
        kind, failed = "greedy baseline" if failed_baseline else "trajectory", failed_baseline or first.trajectories[0]
        raise ValueError(
            f"none of the {len(groups)} groups of this iteration can be trained on, so there is nothing to learn from. "
            f"First failure ({kind}, {failed.score.outcome}): {failed.score.reason}"
        )


def add_recent_groups(run: TrainingRun, iteration: int, collected: CollectedGroups) -> CollectedGroups:
    """Choose groups of earlier iterations to train on again (data.reuse), and keep this iteration's groups for later.

    Groups without reward variance are not kept, because they have no advantages. Groups that were sampled at another
    temperature are dropped: a resumed run may have a new temperature.
    """
    data, temperatures = run.config.data, {None, run.config.actor_rollout_ref.rollout.temperature}
    if not data.reuse.groups:
        return collected
    kept = [
        (origin, group)
        for origin, group in run.progress.recent.entries
        if iteration - origin <= data.reuse.max_age
        and {row.temperature for sample in group.trajectories for row in sample.rows} <= temperatures
    ]
    rng = np.random.default_rng(derive_seed(data.seed, "reuse", iteration))
    chosen = [kept[index] for index in sorted(rng.permutation(len(kept))[: data.reuse.groups])]
    own = [(iteration, group) for group in collected.selected if has_metric_variance(group, "reward")]
    ages = [iteration - origin for origin, _ in chosen]
    metrics = {"reuse/groups": float(len(chosen)), "reuse/age": float(np.mean(ages)) if ages else 0.0}
    recent, reused = RecentGroups((*kept, *own)), [group for _, group in chosen]
    return replace(collected, reused=reused, recent=recent, metrics=collected.metrics | metrics)


MAX_ROUNDS = 10  # batches of finished groups after which an asynchronous iteration takes an incomplete batch
COUNTED_EVENTS = ("started", "finished", "trained", "dropped_failed", "dropped_no_signal")


class InFlightGroups:
    """Rollout groups of an asynchronous run that are being generated or wait for their batch.

    Iteration s updates the weights from version s - 1 to s. A group that was started with version v is trained on in
    iteration v + 1 + `trainer.max_staleness` at the latest: at most train_batch_size * (max_staleness + 1) groups are
    in flight, and `take_batch` waits for older groups that later batches could not train on in time. A resumed run
    generates the groups in flight again: `Progress.unfinished` has their positions in the stream of training prompts.
    """

    def __init__(self, run: TrainingRun):
        self._run = run
        self._size = run.config.data.train_batch_size
        self._staleness = run.config.trainer.max_staleness
        filters = run.config.algorithm.filter_groups
        self._max_finished = self._size * (filters.max_rounds if filters.enable else MAX_ROUNDS)  # in an iteration
        self._generating: dict[int, asyncio.Task[TrajectoryGroup]] = {}  # by position in the stream of training prompts
        self._start_versions: dict[int, int] = {}  # weight version at the start of each group in flight, by position
        self._has_news = asyncio.Event()  # set when a task is done
        self._ready: dict[int, TrajectoryGroup] = {}  # finished groups that wait for their batch
        self._counts: Counter[str] = Counter()
        self._waited = 0.0  # seconds that the last batch waited for older groups when it was full

    def start_groups(self, version: int) -> None:
        """Start as many groups as max_staleness and the run's goal allow. version: weight version of the engines."""
        run, progress = self._run, self._run.progress
        self._remove_lost_groups()  # of an engine that a publish has replaced
        limit = min(run.goal.max_steps - version, self._staleness + 1) * self._size
        if len(self._start_versions) >= limit:
            return
        unstarted = [position for position in progress.unfinished if position not in self._start_versions]
        started: list[int] = []
        while len(self._start_versions) + len(started) < limit:
            if unstarted:
                position = unstarted.pop(0)
            elif run.goal.max_prompts is None or progress.prompts_consumed < run.goal.max_prompts:
                position = progress.prompts_consumed
                progress.prompts_consumed += 1
                progress.unfinished.append(position)
                self._counts["started"] += 1
            else:
                break
            started.append(position)
        for position, request in zip(started, make_group_requests(run, started), strict=True):
            self._start_versions[position] = version
            self._generating[position] = asyncio.ensure_future(run.workers.engines.generate_group(request))
            self._generating[position].add_done_callback(lambda _: self._has_news.set())

    async def take_batch(self, iteration: int, timer: Timer) -> CollectedGroups:
        """Wait for the groups of an iteration and return them.

        The batch is smaller than data.train_batch_size only at the end of the data, or if too many groups are dropped.
        """
        dropped: dict[int, TrajectoryGroup] = {}
        full_since: float | None = None
        with timer("generate"):
            while not self._is_batch_ready(iteration, len(dropped)):
                if full_since is None and len(self._ready) >= self._size:
                    full_since = time.perf_counter()
                if death := self._remove_lost_groups():
                    await self._run.workers.engines.replace_engine(death)
                self.start_groups(iteration - 1)
                if not self._generating:
                    break
                self._run.console.show_phase("generate", min(len(self._ready), self._size), self._size)
                await self._has_news.wait()
                self._has_news.clear()
                dropped |= await self._accept_or_drop_finished_groups(dropped)
        self._waited = 0.0 if full_since is None else time.perf_counter() - full_since
        gave_up = len(dropped) + len(self._ready) >= self._max_finished
        if len(self._ready) < self._size and gave_up and not self._run.config.algorithm.filter_groups.reweights:
            notify_incomplete_batch(self._run, iteration, len(self._ready))
        chosen = self._choose_oldest_ready_positions()
        groups = [self._ready[position] for position in chosen]
        self._counts["trained"] += len(chosen)
        for position in chosen:
            self._remove_group(position)
        generated = dict(zip(chosen, groups, strict=True)) | dropped
        in_order = [generated[position] for position in sorted(generated)]
        metrics = compute_staleness_metrics(groups, iteration - 1)
        collected = CollectedGroups(groups, in_order, math.ceil(len(in_order) / self._size), metrics=metrics)
        return add_recent_groups(self._run, iteration, collected)

    def pop_metrics(self) -> dict[str, float]:
        """Return numbers of groups: started, finished, trained and dropped since the last call, and now in flight."""
        counts, self._counts = self._counts, Counter()
        return {f"async/{name}": float(counts[name]) for name in COUNTED_EVENTS} | {
            "async/carried": float(len(self._run.progress.unfinished)),
            "async/ready": float(len(self._ready)),
            "async/waited_for_oldest": self._waited,
        }

    async def close(self) -> None:
        """Cancel the groups that are being generated."""
        for task in self._generating.values():
            task.cancel()
        await asyncio.gather(*self._generating.values(), return_exceptions=True)

    def _choose_oldest_ready_positions(self) -> list[int]:
        return sorted(self._ready)[: self._size]

    def _is_batch_ready(self, iteration: int, num_dropped: int) -> bool:
        """Whether the batch is full (or too many groups were dropped) and no remaining group would become too old."""
        if len(self._ready) < self._size and num_dropped + len(self._ready) < self._max_finished:
            return False
        remaining = sorted(self._start_versions.keys() - set(self._choose_oldest_ready_positions()))  # oldest first
        return all(
            iteration + 1 + order // self._size <= self._start_versions[position] + 1 + self._staleness
            for order, position in enumerate(remaining)
        )

    async def _accept_or_drop_finished_groups(self, dropped: dict[int, TrajectoryGroup]) -> dict[int, TrajectoryGroup]:
        """Mark each finished group as ready, or drop it. Returns the groups dropped by this call, by stream position.

        dropped: groups of this iteration that earlier calls dropped. Raises an engine's error if a group's generation
        failed, and ValueError if all groups of this iteration so far have failed.
        """
        scorer, num_generating = self._run.reward_model_scorer, len(self._generating)
        done = [(position, task) for position, task in sorted(self._generating.items()) if task.done()]
        finished = {position: task.result() for position, task in done if not is_lost(task)}
        if scorer and len(finished) < num_generating and len(self._ready) + len(finished) < self._size:
            return {}  # wait to score a full batch at once, because each reward-model phase clears the engines' caches
        for position in finished:
            del self._generating[position]
        self._counts["finished"] += len(finished)
        self._run.console.count_tokens(list(finished.values()))
        if scorer:
            await scorer.score_groups(finished.values())
        newly_dropped = {}
        for position, group in finished.items():
            if is_usable_for_training(group) and passes_dynamic_sampling(self._run, group):
                self._ready[position] = group
                continue
            newly_dropped[position] = group
            self._counts["dropped_no_signal" if is_usable_for_training(group) else "dropped_failed"] += 1
            self._remove_group(position)
        if len(dropped) + len(newly_dropped) >= self._size and not self._ready:
            check_not_all_failed([*dropped.values(), *newly_dropped.values()])
        return newly_dropped

    def _remove_lost_groups(self) -> EngineCoreDied | None:
        """Forget the groups whose engine died, so that they are started again. Returns one of the deaths, if any."""
        death: EngineCoreDied | None = None
        for position in [position for position, task in self._generating.items() if is_lost(task)]:
            death = self._generating.pop(position).exception()  # type: ignore[assignment]
            del self._start_versions[position]
        return death

    def _remove_group(self, position: int) -> None:
        self._ready.pop(position, None)
        del self._start_versions[position]
        self._run.progress.unfinished.remove(position)


def is_lost(task: asyncio.Task[TrajectoryGroup]) -> bool:
    """Whether the death of an engine ended the generation of a group."""
    return task.done() and isinstance(task.exception(), EngineCoreDied)


def compute_staleness_metrics(groups: Sequence[TrajectoryGroup], trained_version: int) -> dict[str, float]:
    """Compute by how many versions the sampled tokens are older than the weights that are trained on them.

    Returns mean and maximum over tokens, and the share of trajectories with tokens of several versions.
    """
    trajectories = [sample for group in groups for sample in group.trajectories if sample.rows]
    token_counts = [item for sample in trajectories for row in sample.rows for item in row.weight_versions]
    if not token_counts:
        return {}
    per_sample = [{version for row in sample.rows for version, _ in row.weight_versions} for sample in trajectories]
    mean = sum(version * count for version, count in token_counts) / sum(count for _, count in token_counts)
    return {
        "staleness/mean": trained_version - mean,
        "staleness/max": float(trained_version - min(version for version, _ in token_counts)),
        "staleness/mixed": sum(len(versions) > 1 for versions in per_sample) / len(per_sample),
    }
