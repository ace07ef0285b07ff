"""Groups in flight of an asynchronous run: being generated, or complete and waiting for their batch.

stream position -> start -> engines -> complete (-> filter) -> take: `data.train_batch_size` groups, oldest first

Iteration s trains weight version s - 1 into version s. A group that starts with weight version v is trained on in
iteration v + 1 + `trainer.max_staleness` at the latest. Two rules guarantee this:
1. At most train_batch_size * (max_staleness + 1) groups are in flight at a time.
2. `take` waits for incomplete older groups, unless all of them can be trained on in time in later batches.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.run_state import TrainingRun
from alphaapollo.trainer.step.collect import (
    CollectedGroups,
    check_not_all_failed,
    collect,
    make_request,
    passes_filter,
)
from alphaapollo.trainer.step.training_batch import is_usable
from alphaapollo.types import TrajectoryGroup

COUNTED = ("started", "finished", "trained", "dropped_failed", "dropped_no_signal", "dropped_stale")


class InFlightGroups:
    """Groups of an asynchronous run that are being generated or wait for their batch.

    Their stream positions are in `Progress.unfinished`. A resumed run generates these groups again, in stream order.
    """

    def __init__(self, run: TrainingRun):
        self._run = run
        self._size = run.config.data.train_batch_size
        self._staleness = run.config.trainer.max_staleness
        self._generating: dict[int, asyncio.Task[TrajectoryGroup]] = {}  # by draw (stream position)
        self._version: dict[int, int] = {}  # weight version at the start of each group in flight
        self._ready: dict[int, TrajectoryGroup] = {}
        self._counts: Counter[str] = Counter()
        self._waited = 0.0  # seconds that the last batch waited for older groups after it was full

    def start(self, version: int) -> None:
        """Start generating as many groups as can be trained on in time. version: weight version of the engines."""
        if not self._staleness:
            return  # `take` generates the groups of each iteration
        run, progress = self._run, self._run.progress
        needed = (run.goal.steps - version) * self._size
        waiting = [draw for draw in progress.unfinished if draw not in self._version]
        while len(self._version) < min(needed, self._size * (self._staleness + 1)):
            if waiting:
                draw = waiting.pop(0)
            elif run.goal.prompts is None or progress.prompts_consumed < run.goal.prompts:
                draw = progress.prompts_consumed
                progress.prompts_consumed += 1
                progress.unfinished.append(draw)
                self._counts["started"] += 1
            else:
                return
            self._version[draw] = version
            self._generating[draw] = asyncio.ensure_future(run.workers.engines.generate_group(make_request(run, draw)))

    async def take(self, step: int, timer: Timer) -> CollectedGroups:
        """Wait for the groups of iteration `step` and return them.

        They are fewer than a batch only at the end of the data, or if dynamic sampling gives up. With max_staleness=0
        this collects groups like the synchronous loop.
        """
        if not self._staleness:
            num_unfinished = len(self._run.progress.unfinished)  # from a run with another max_staleness
            collected = await collect(self._run, step, timer)
            return self._count_collected(collected, num_unfinished - len(self._run.progress.unfinished))
        dropped: dict[int, TrajectoryGroup] = {}
        complete_since: float | None = None
        with timer("generate"):
            while not self._is_batch_ready(step, len(dropped)):
                if complete_since is None and len(self._ready) >= self._size:
                    complete_since = time.perf_counter()
                self.start(step - 1)
                if not self._generating:
                    break
                self._run.console.show_phase("generate", min(len(self._ready), self._size), self._size)
                if pending := [task for task in self._generating.values() if not task.done()]:
                    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                dropped |= await self._sort_finished(dropped)
        self._waited = 0.0 if complete_since is None else time.perf_counter() - complete_since
        chosen = self._choose_oldest()
        groups = [self._ready[draw] for draw in chosen]
        self._counts["trained"] += len(chosen)
        for draw in chosen:
            self._remove_draw(draw)
        generated = dict(zip(chosen, groups, strict=True)) | dropped
        in_order = [generated[draw] for draw in sorted(generated)]
        return CollectedGroups(groups, in_order, rounds=-(-len(in_order) // self._size))

    def take_metrics(self) -> dict[str, float]:
        """Return counts since the last call: previous carried + started = trained + dropped + carried."""
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

    def _choose_oldest(self) -> list[int]:
        return sorted(self._ready)[: self._size]

    def _is_batch_ready(self, step: int, num_dropped: int) -> bool:
        """Whether a batch can be taken: it is full or dynamic sampling gives up, and no other group becomes too old."""
        filters, chosen = self._run.config.algorithm.filter_groups, self._choose_oldest()
        gives_up = filters.enable and num_dropped + len(self._ready) >= filters.max_num_gen_batches * self._size
        if len(chosen) < self._size and not gives_up:
            return False
        remaining = sorted(self._version.keys() - set(chosen))  # oldest first
        return all(
            step + 1 + position // self._size <= self._version[draw] + 1 + self._staleness
            for position, draw in enumerate(remaining)
        )

    async def _sort_finished(self, dropped: dict[int, TrajectoryGroup]) -> dict[int, TrajectoryGroup]:
        """Mark finished groups as ready, or drop them. Returns the dropped groups, by draw.

        Raises the errors of engines, and ValueError if all groups of this iteration so far have failed.
        """
        scorer, started = self._run.reward_model_scorer, sorted(self._generating.items())
        finished = {draw: task.result() for draw, task in started if task.done()}
        if scorer and len(finished) < len(started) and len(self._ready) + len(finished) < self._size:
            return {}  # score a full batch at once: each reward-model phase clears the engines' caches
        for draw in finished:
            del self._generating[draw]
        self._counts["finished"] += len(finished)
        if scorer:
            await scorer.score_groups(finished.values())
        unusable = {}
        for draw, group in finished.items():
            if is_usable(group) and passes_filter(self._run, group):
                self._ready[draw] = group
                continue
            unusable[draw] = group
            self._counts["dropped_no_signal" if is_usable(group) else "dropped_failed"] += 1
            self._remove_draw(draw)
        if len(dropped) + len(unusable) >= self._size and not self._ready:
            check_not_all_failed([*dropped.values(), *unusable.values()])
        return unusable

    def _remove_draw(self, draw: int) -> None:
        self._ready.pop(draw, None)
        del self._version[draw]
        self._run.progress.unfinished.remove(draw)

    def _count_collected(self, collected: CollectedGroups, started_before: int) -> CollectedGroups:
        """Count the groups that `collect` returned. Surplus groups of dynamic sampling count as stale.

        started_before: number of groups that an earlier run had started.
        """
        usable = [group for group in collected.generated if is_usable(group)]
        num_passed = sum(passes_filter(self._run, group) for group in usable)
        self._counts.update(
            started=len(collected.generated) - started_before,
            finished=len(collected.generated),
            trained=len(collected.groups),
            dropped_failed=len(collected.generated) - len(usable),
            dropped_no_signal=len(usable) - num_passed,
            dropped_stale=num_passed - len(collected.groups),
        )
        return collected


def staleness_metrics(groups: Sequence[TrajectoryGroup], version: int) -> dict[str, float]:
    """Compute the staleness of the trained tokens: `version` minus the weight version that sampled the token.

    Returns mean and maximum over tokens, and the share of trajectories with tokens of several versions.
    """
    counts: Counter[int] = Counter()
    trajectories = mixed = 0
    for trajectory in (one for group in groups for one in group.trajectories if one.rows):
        versions = Counter(chain.from_iterable(row.weight_versions for row in trajectory.rows))
        counts.update(versions)
        trajectories, mixed = trajectories + 1, mixed + (len(versions) > 1)
    tokens = counts.total()
    if not tokens:
        return {}
    return {
        "staleness/mean": sum((version - sampler) * count for sampler, count in counts.items()) / tokens,
        "staleness/max": float(version - min(counts)),
        "staleness/mixed": mixed / trajectories,
    }
