"""Rollout groups in flight of an asynchronous run: being generated, or complete and waiting for their batch.

start_groups -> engines generate -> complete (-> dynamic sampling) -> take_batch: the oldest complete groups

Iteration s updates the weights from version s - 1 to s. A group that was started with version v is trained on in
iteration v + 1 + `trainer.max_staleness` at the latest. Two rules guarantee this:
1. At most train_batch_size * (max_staleness + 1) groups are in flight at a time.
2. `take_batch` waits for incomplete older groups, unless all of them can be trained on in time in later batches.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.collect import (
    CollectedGroups,
    add_recent_groups,
    check_not_all_failed,
    make_group_requests,
    passes_dynamic_sampling,
)
from alphaapollo.trainer.step.training_batch import is_usable_for_training
from alphaapollo.types import TrajectoryGroup

COUNTED = ("started", "finished", "trained", "dropped_failed", "dropped_no_signal")


class InFlightGroups:
    """Rollout groups of an asynchronous run that are being generated or wait for their batch.

    `Progress.unfinished` has their positions in the stream of training prompts, so a resumed run generates them again.
    """

    def __init__(self, run: TrainingRun):
        self._run = run
        self._size = run.config.data.train_batch_size
        self._staleness = run.config.trainer.max_staleness
        self._generating: dict[int, asyncio.Task[TrajectoryGroup]] = {}  # by position in the stream of training prompts
        self._version: dict[int, int] = {}  # weight version at the start of each group in flight
        self._has_news = asyncio.Event()  # set when a task is done
        self._ready: dict[int, TrajectoryGroup] = {}
        self._counts: Counter[str] = Counter()
        self._waited = 0.0  # seconds that the last batch waited for older groups after it was full

    def start_groups(self, version: int) -> None:
        """Start as many groups as max_staleness and the run's goal allow. version: weight version of the engines."""
        run, progress = self._run, self._run.progress
        limit = min(run.goal.max_steps - version, self._staleness + 1) * self._size
        if len(self._version) >= limit:
            return
        waiting = [position for position in progress.unfinished if position not in self._version]
        started: list[int] = []
        while len(self._version) + len(started) < limit:
            if waiting:
                position = waiting.pop(0)
            elif run.goal.max_prompts is None or progress.prompts_consumed < run.goal.max_prompts:
                position = progress.prompts_consumed
                progress.prompts_consumed += 1
                progress.unfinished.append(position)
                self._counts["started"] += 1
            else:
                break
            started.append(position)
        for position, request in zip(started, make_group_requests(run, started), strict=True):
            self._version[position] = version
            self._generating[position] = asyncio.ensure_future(run.workers.engines.generate_group(request))
            self._generating[position].add_done_callback(lambda _: self._has_news.set())

    async def take_batch(self, iteration: int, timer: Timer) -> CollectedGroups:
        """Wait for the groups of an iteration and return them.

        The batch is smaller than data.train_batch_size only at the end of the data, or if dynamic sampling gives up.
        """
        dropped: dict[int, TrajectoryGroup] = {}
        complete_since: float | None = None
        with timer("generate"):
            while not self._is_batch_ready(iteration, len(dropped)):
                if complete_since is None and len(self._ready) >= self._size:
                    complete_since = time.perf_counter()
                self.start_groups(iteration - 1)
                if not self._generating:
                    break
                self._run.console.show_phase("generate", min(len(self._ready), self._size), self._size)
                await self._has_news.wait()
                self._has_news.clear()
                dropped |= await self._accept_or_drop_finished_groups(dropped)
        self._waited = 0.0 if complete_since is None else time.perf_counter() - complete_since
        chosen = self._choose_oldest_ready_positions()
        groups = [self._ready[position] for position in chosen]
        self._counts["trained"] += len(chosen)
        for position in chosen:
            self._remove_group(position)
        generated = dict(zip(chosen, groups, strict=True)) | dropped
        in_order = [generated[position] for position in sorted(generated)]
        metrics = compute_staleness_metrics(groups, iteration - 1)
        collected = CollectedGroups(groups, in_order, rounds=-(-len(in_order) // self._size), metrics=metrics)
        return add_recent_groups(self._run.progress.recent, iteration, collected, self._run.config.data)

    def pop_metrics(self) -> dict[str, float]:
        """Return numbers of groups: started, finished, trained and dropped since the last call, and now in flight."""
        counts, self._counts = self._counts, Counter()
        return {f"async/{name}": float(counts[name]) for name in COUNTED} | {
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
        """Whether the batch is full (or dynamic sampling gives up) and no group left for later would become too old."""
        filters = self._run.config.algorithm.filter_groups
        gives_up = filters.enable and num_dropped + len(self._ready) >= filters.max_num_gen_batches * self._size
        if len(self._ready) < self._size and not gives_up:
            return False
        remaining = sorted(self._version.keys() - set(self._choose_oldest_ready_positions()))  # oldest first
        return all(
            iteration + 1 + order // self._size <= self._version[position] + 1 + self._staleness
            for order, position in enumerate(remaining)
        )

    async def _accept_or_drop_finished_groups(self, dropped: dict[int, TrajectoryGroup]) -> dict[int, TrajectoryGroup]:
        """Mark each finished group as ready, or drop it. Returns the groups dropped by this call, by stream position.

        dropped: groups of this iteration that earlier calls dropped. Raises an engine's error if a group's generation
        failed, and ValueError if all groups of this iteration so far have failed.
        """
        scorer, num_started = self._run.reward_model_scorer, len(self._generating)
        finished = {position: task.result() for position, task in sorted(self._generating.items()) if task.done()}
        if scorer and len(finished) < num_started and len(self._ready) + len(finished) < self._size:
            return {}  # score a full batch at once: each reward-model phase clears the engines' caches
        for position in finished:
            del self._generating[position]
        self._counts["finished"] += len(finished)
        if scorer:
            await scorer.score_groups(finished.values())
        unusable = {}
        for position, group in finished.items():
            if is_usable_for_training(group) and passes_dynamic_sampling(self._run, group):
                self._ready[position] = group
                continue
            unusable[position] = group
            self._counts["dropped_no_signal" if is_usable_for_training(group) else "dropped_failed"] += 1
            self._remove_group(position)
        if len(dropped) + len(unusable) >= self._size and not self._ready:
            check_not_all_failed([*dropped.values(), *unusable.values()])
        return unusable

    def _remove_group(self, position: int) -> None:
        self._ready.pop(position, None)
        del self._version[position]
        self._run.progress.unfinished.remove(position)


def compute_staleness_metrics(groups: Sequence[TrajectoryGroup], trained_version: int) -> dict[str, float]:
    """Compute by how many versions the sampled tokens are older than the weights that are trained on them.

    Returns mean and maximum over tokens, and the share of trajectories with tokens of several versions.
    """
    trajectories = [one for group in groups for one in group.trajectories if one.rows]
    runs = [run for one in trajectories for row in one.rows for run in row.weight_versions]
    if not runs:
        return {}
    versions = [{version for row in one.rows for version, _ in row.weight_versions} for one in trajectories]
    mean = sum(version * count for version, count in runs) / sum(count for _, count in runs)
    return {
        "staleness/mean": trained_version - mean,
        "staleness/max": float(trained_version - min(runs)[0]),
        "staleness/mixed": sum(len(found) > 1 for found in versions) / len(versions),
    }
