"""A thread of the controller that sees when a run stands still, says who holds it up, and ends it if that lasts.

    every tick    has this process done anything? Nothing else is asked while it has
    still         how are the workers? (a call in a lane of its own, which a busy worker answers too)
    notice        one line: who, what, since when (stalls.py is the judge)
    timeout       stacks into the run's folder, and out of the `async with` comes Stalled

A thread, for with trainer.controller=local a worker's call holds the loop up.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from alphaapollo.config.errors import failed
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.health.stall_detector import STOPPED, Finding, Look, Seen, judge, moved
from alphaapollo.controller.ranks import Ranks, Stalled
from alphaapollo.utils.heartbeat import PULSE, read_process
from alphaapollo.utils.stack_dumps import stacks_of

TICKS = 10  # looks within trainer.stall_notice ...
SHORTEST_TICK = 0.5  # ... but the kernel counts CPU time in hundredths of a second
ANSWER_SECONDS = 5.0  # who has not answered by then is silent, until he does
GRACE_SECONDS = 30.0  # for the loop to end after it was told to
MARGIN_SECONDS = 30.0  # beyond the limit of what ends by itself
MAX_STACKS = 16  # processes whose stacks are written


@dataclass(frozen=True)
class Patience:
    """trainer.stall_notice and trainer.stall_timeout, seconds."""

    notice: float
    timeout: float | None


class StallWatch:
    """`async with StallWatch(...):` around what is to be watched. Raises Stalled out of the block.

    Args:
        ranks: the workers, all roles.
        folder: where stacks are written.
        tell: shows one line; called from another thread.
        way_on: what to say of how the run can be gone on with.
        see: looks at everybody; None: through `ranks`.
        needed: pid by name, of processes besides the workers without which nothing goes on for long (Ray's own). One
            that is stopped is told of after `patience.notice`, though the run may not wait for it yet.
    """

    def __init__(
        self,
        ranks: Sequence[Ranks[Any]],
        patience: Patience,
        device: Device,
        folder: Path,
        tell: Callable[[str], None],
        way_on: Callable[[], str],
        see: Callable[[], Look | None] | None = None,
        needed: Mapping[str, int] = MappingProxyType({}),
    ):
        self._ranks, self._patience, self._device, self._folder = ranks, patience, device, folder
        self._tell, self._way_on, self._see = tell, way_on, see or self._ask
        self._tick = max(patience.notice / TICKS, SHORTEST_TICK)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall-watch", daemon=True)
        self._error: Stalled | None = None
        self._before: Look | None = None
        self._beats = -1
        self._still = 0.0  # seconds since the last count
        self._idle = 0.0  # seconds since the last count or computation
        self._told: set[bool] = set()  # by Finding.stuck
        self._failures: set[type[Exception]] = set()  # of looks
        self._needed = {pid: name for name, pid in needed.items()}
        self._stopped: dict[int, float] = {}  # seconds, by pid

    def gave_up(self) -> bool:
        """It is who has cancelled the block."""
        return self._error is not None

    async def __aenter__(self) -> StallWatch:
        if self._needed:
            PULSE.watch(int, lambda: self._needed)
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join(ANSWER_SECONDS)
        if self._error is not None and kind is asyncio.CancelledError:
            assert self._task
            while self._task.cancelling():
                self._task.uncancel()
            raise self._error from None

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._left.wait(self._tick):
            now = time.monotonic()
            # Time that went by without us was nobody's: the machine slept, or Ctrl-Z stopped the run.
            try:
                self.look(min(now - last, 2 * self._tick + ANSWER_SECONDS))
            except Exception as error:  # noqa: BLE001  who looks must not end in silence
                self._tell_failure(error)
            last = now

    def _tell_failure(self, error: Exception) -> None:
        if type(error) not in self._failures:  # each kind once
            self._failures.add(type(error))
            trace = "".join(traceback.format_exception(error))
            self._tell(f"the watch for stalls failed in a look, which is a bug; it goes on:\n{trace}")

    def look(self, seconds: float) -> None:
        """So much time has gone by since the last look."""
        self._look_at_needed(seconds)
        if PULSE.beats != self._beats:
            self._beats = PULSE.beats
            self._moves()
            return
        self._still += seconds
        self._idle += seconds
        if self._still < self._patience.notice / 2 or (now := self._see()) is None:
            return
        before, self._before = self._before, now
        if before is None:
            return
        if moved(before, now):
            self._moves()
            self._before = now
            return
        finding = judge(before, now, self._device)
        if not finding.stuck:
            self._idle = 0.0
        if self._still >= self._patience.notice and finding.stuck not in self._told:
            self._told.add(finding.stuck)
            self._tell(self._notice(finding))
        if self._patience.timeout is not None and self._idle >= self._limit(finding, self._patience.timeout):
            self._end(finding, now)

    def _look_at_needed(self, seconds: float) -> None:
        """Each is told of once, at the look that comes after the notice's time."""
        for pid, name in self._needed.items():
            process, before = read_process(pid), self._stopped.get(pid, 0.0)
            self._stopped[pid] = before + seconds if process and process.stopped else 0.0
            if before < self._patience.notice <= self._stopped[pid]:
                self._tell(f"{name} (pid {pid}) is {STOPPED}")

    def _moves(self) -> None:
        if self._told:
            self._tell(f"it moves again, after {self._still:.0f} s")
        self._still = self._idle = 0.0
        self._before = None
        self._told.clear()

    def _limit(self, finding: Finding, timeout: float) -> float:
        """What has a time limit of its own is given that; nobody who is stopped has one."""
        return max(timeout, finding.limit + MARGIN_SECONDS) if finding.limit else timeout

    def _notice(self, finding: Finding) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._still))
        text = f"nothing has moved for {self._still:.0f} s, since {since}: {finding.verdict}; {finding.waiting}."
        if finding.stuck and self._patience.timeout is not None:
            limit = self._limit(finding, self._patience.timeout)
            text += f" At {limit:.0f} s the run ends (trainer.stall_timeout)."
        return text

    # the end

    def _end(self, finding: Finding, now: Look) -> None:
        file = self._write_stacks(finding, now)
        self._error = Stalled(
            f"nothing has moved for {self._idle:.0f} s (trainer.stall_timeout): {finding.verdict}; "
            f"{finding.waiting}. {file}",
            [culprit.key for culprit in finding.culprits],
            self._way_on(),
        )
        if self._left.is_set():  # somebody else has ended it meanwhile
            return
        assert self._task
        for _ in range(2):  # told once, it may be waiting for a checkpoint on its way, which may not come either
            self._loop.call_soon_threadsafe(self._task.cancel)
            if self._left.wait(GRACE_SECONDS):
                return
        failed(self._error, 1)  # the loop itself stands: the reaper ends what is left of the run
        os._exit(1)

    def _write_stacks(self, finding: Finding, now: Look) -> str:
        """Where they lie, in words."""
        path = self._folder / "stalls" / time.strftime("%Y-%m-%d_%H-%M-%S.txt")
        others = [one for one in (*now.awaited, now.controller) if one not in finding.culprits]
        seen = [*finding.culprits, *others][:MAX_STACKS]
        text = "\n".join(
            [f"{finding.verdict}; {finding.waiting}", "", *map(_described, now.everyone), ""]
            + [self._stacks(one, now.workers) for one in seen]
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            return f"Python stacks cannot be written ({error})"
        return f"Python stacks of who waits, and for whom, lie in {path}"

    def _stacks(self, one: Seen, workers: Mapping[str, Seen]) -> str:
        """By itself, by the controller, or by whoever answers on its node."""
        pids = [process.pid for process in one.processes if process.needed] or [one.pid]
        near = [one, *workers.values()] if one.key in workers else []
        who = next((near_by for near_by in near if near_by.report and near_by.node == one.node), None)
        if one.here and (one.report is None or who is None):
            text = stacks_of(pids)
        elif who is None:
            text = "no stacks: nobody answers on its node"
        else:
            ranks = next(ranks for ranks in self._ranks if ranks.role == who.role)
            text = ranks.stacks(who.rank, pids)
        return f"=== {one.name}\n{text}"

    # looks

    def _ask(self) -> Look | None:
        """None: the watch ends meanwhile."""
        end = time.monotonic() + ANSWER_SECONDS
        for ranks in self._ranks:
            ranks.ask()
        while not all(ranks.answered() for ranks in self._ranks) and time.monotonic() < end:
            if self._left.wait(0.05):
                return None
        pid = os.getpid()
        report = PULSE.report()
        itself, *others = report.processes
        itself = replace(itself, cpu_seconds=itself.cpu_seconds - time.thread_time())  # looking is no work of the run
        report = replace(report, processes=(itself, *others))
        controller = Seen("controller", f"the controller (pid {pid})", report, pid=pid)
        workers = {one.key: one for ranks in self._ranks for one in ranks.seen()}
        return Look(time.monotonic(), controller, workers)


def _described(one: Seen) -> str:
    """A process and those that work for it."""
    lines = [one.name if one.report else f"{one.name}: does not answer"]
    if one.report:
        doing = (f"{kind.count} x {kind.what} {kind.whom} for {kind.seconds:.0f} s" for kind in one.report.doing)
        lines += [f"    in {what}" for what in doing]
    lines += [f"    {of.pid} {of.name}: state {of.state}, CPU {of.cpu_seconds:.1f} s" for of in one.processes]
    return "\n".join(lines)
