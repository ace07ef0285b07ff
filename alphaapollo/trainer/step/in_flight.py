"""What an asynchronous run has ahead: prompts that are being played, or whose group is whole and waits for its batch.

stream position -> start -> engines -> whole (-> a signal?) -> take: `data.train_batch_size` groups, the oldest first

A group that is started while the engines hold version v is trained on in iteration v + 1 + `trainer.max_staleness` at
the latest (iteration s makes version s out of version s - 1). That holds by two rules: no more than
train_batch_size * (max_staleness + 1) groups are out at a time, and `take` goes before the oldest are whole only where
all that it leaves behind can still be trained on in time, a batch an iteration. So no group is ever too old: the batch
waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from alphaapollo.observability.timing import Timer
from alphaapollo.trainer.run_state import Run
from alphaapollo.trainer.step.collect import Collected, check_not_all_failed, collect, has_signal, request_of
from alphaapollo.trainer.step.training_batch import usable
from alphaapollo.types import TrajectoryGroup

COUNTED = ("started", "finished", "trained", "dropped_failed", "dropped_no_signal", "dropped_stale")


class InFlight:
    """Its prompts are those of `Progress.unfinished`: a resumed run plays them again, in the order of the stream."""

    def __init__(self, run: Run):
        self._run = run
        self._size = run.config.data.train_batch_size
        self._staleness = run.config.trainer.max_staleness
        self._playing: dict[int, asyncio.Task[TrajectoryGroup]] = {}  # by draw, the position in the stream
        self._version: dict[int, int] = {}  # what the engines held when each of all these was started
        self._ready: dict[int, TrajectoryGroup] = {}
        self._counts: Counter[str] = Counter()
        self._waited = 0.0  # seconds that the last batch, already whole, waited for the oldest

    def start(self, version: int) -> None:
        """Start as many prompts as can still be trained on in time; `version` is what the engines hold."""
        if not self._staleness:
            return  # an iteration collects its own
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
            self._playing[draw] = asyncio.ensure_future(run.crew.engines.play(request_of(run, draw)))

    async def take(self, step: int, timer: Timer) -> Collected:
        """The groups of iteration `step`; fewer than asked for only where no more can come, or where dynamic sampling
        gives up. With a staleness of 0 nothing may be ahead, so it is what the synchronous loop collects."""
        if not self._staleness:
            left = len(self._run.progress.unfinished)  # by an earlier start with another staleness
            collected = await collect(self._run, step, timer)
            return self._counted(collected, left - len(self._run.progress.unfinished))
        dropped: dict[int, TrajectoryGroup] = {}
        whole_since: float | None = None
        with timer("generate"):
            while not self._enough(step, len(dropped)):
                if whole_since is None and len(self._ready) >= self._size:
                    whole_since = time.perf_counter()
                self.start(step - 1)
                if not self._playing:
                    break
                self._run.console.phase("generate", min(len(self._ready), self._size), self._size)
                if still := [task for task in self._playing.values() if not task.done()]:
                    await asyncio.wait(still, return_when=asyncio.FIRST_COMPLETED)
                dropped |= await self._sort(dropped)
        self._waited = 0.0 if whole_since is None else time.perf_counter() - whole_since
        chosen = self._chosen()
        groups = [self._ready[draw] for draw in chosen]
        self._counts["trained"] += len(chosen)
        for draw in chosen:
            self._forget(draw)
        generated = dict(zip(chosen, groups, strict=True)) | dropped
        every = [generated[draw] for draw in sorted(generated)]
        return Collected(groups, every, rounds=-(-len(every) // self._size))

    def metrics(self) -> dict[str, float]:
        """What became of the groups since last asked: carried before + started = trained + dropped + carried now."""
        counts, self._counts = self._counts, Counter()
        figures = {f"async/{name}": float(counts[name]) for name in COUNTED}
        return figures | {
            "async/carried": float(len(self._run.progress.unfinished)),
            "async/ready": float(len(self._ready)),
            "async/waited_for_oldest": self._waited,
        }

    async def close(self) -> None:
        """Nobody waits for what is still played."""
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def _chosen(self) -> list[int]:
        return sorted(self._ready)[: self._size]

    def _enough(self, step: int, num_dropped: int) -> bool:
        """A whole batch, or dynamic sampling has looked at as many prompts as it may; and nothing becomes too old."""
        filters, chosen = self._run.config.algorithm.filter_groups, self._chosen()
        tired = filters.enable and num_dropped + len(self._ready) >= filters.max_num_gen_batches * self._size
        if len(chosen) < self._size and not tired:
            return False
        left = sorted(self._version.keys() - set(chosen))  # in the order in which they were started
        return all(
            step + 1 + place // self._size <= self._version[draw] + 1 + self._staleness
            for place, draw in enumerate(left)
        )

    async def _sort(self, dropped: dict[int, TrajectoryGroup]) -> dict[int, TrajectoryGroup]:
        """Take over what is whole; returns those of it that nothing can be learnt from. Raises what an engine raised,
        and ValueError where so far this iteration has nothing but failures."""
        reward, played = self._run.trained_reward, sorted(self._playing.items())
        whole = {draw: task.result() for draw, task in played if task.done()}
        if reward and len(whole) < len(played) and len(self._ready) + len(whole) < self._size:
            return {}  # its phases cost the engines their caches: one for all that a batch may need
        for draw in whole:
            del self._playing[draw]
        self._counts["finished"] += len(whole)
        if reward:
            await reward.add_to(whole.values())
        filters, no_use = self._run.config.algorithm.filter_groups, {}
        for draw, group in whole.items():
            if not usable(group):
                reason = "dropped_failed"
            elif filters.enable and not has_signal(group, filters.metric):
                reason = "dropped_no_signal"
            else:
                self._ready[draw] = group
                continue
            no_use[draw] = group
            self._counts[reason] += 1
            self._forget(draw)
        if len(dropped) + len(no_use) >= self._size and not self._ready:
            check_not_all_failed([*dropped.values(), *no_use.values()])
        return no_use

    def _forget(self, draw: int) -> None:
        self._ready.pop(draw, None)
        del self._version[draw]
        self._run.progress.unfinished.remove(draw)

    def _counted(self, collected: Collected, begun_before: int) -> Collected:
        """By what collect has left out. What dynamic sampling has too much of would be too old in the next one."""
        failed = sum(not usable(group) for group in collected.generated)
        filters = self._run.config.algorithm.filter_groups
        useful = [group for group in collected.generated if usable(group)]
        silent = sum(filters.enable and not has_signal(group, filters.metric) for group in useful)
        trained = len(collected.groups)
        self._counts.update(
            started=len(collected.generated) - begun_before,
            finished=len(collected.generated),
            trained=trained,
            dropped_failed=failed,
            dropped_no_signal=silent,
            dropped_stale=len(useful) - silent - trained,
        )
        return collected


def staleness_metrics(groups: Sequence[TrajectoryGroup], version: int) -> dict[str, float]:
    """How many publishes the trained tokens are older than `version`, the weights that are trained: mean and largest
    over tokens, and the share of trajectories whose tokens are of several versions."""
    counts: Counter[int] = Counter()
    trajectories = mixed = 0
    for one in (one for group in groups for one in group.trajectories if one.rows):
        own = Counter(chain.from_iterable(row.weight_versions for row in one.rows))
        counts.update(own)
        trajectories, mixed = trajectories + 1, mixed + (len(own) > 1)
    tokens = counts.total()
    if not tokens:
        return {}
    return {
        "staleness/mean": sum((version - sampler) * count for sampler, count in counts.items()) / tokens,
        "staleness/max": float(version - min(counts)),
        "staleness/mixed": mixed / trajectories,
    }
