"""Monitors that raise a WorkerLost error out of their block, if the run stalls or a process of Ray dies.

StallMonitor is a thread of the controller, because a worker's call blocks the event loop with trainer.controller=local:

    every check   read the controller's heartbeat; if there was progress, nothing else is inspected
    no progress   collect reports of all workers, which answer even while they compute (separate Ray concurrency group)
    notice        print one line with the blocking process and its active call
    timeout       write stacks to the run's folder, and raise RunStalled out of the `async with`
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

from alphaapollo.config.errors import report_error
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.controller.ranks import CANCELLED_BY_MONITOR, Ranks, RunStalled, WorkerDied, WorkerReport
from alphaapollo.utils.heartbeat import HEARTBEAT, dump_stacks, read_process

CHECKS = 10  # number of checks before a notice
SHORTEST_TICK = 0.5  # minimum seconds between checks, because the kernel counts CPU time in hundredths of a second
ANSWER_SECONDS = 5.0  # time after which a worker counts as silent
GRACE_SECONDS = 30.0  # time for the event loop to end after a cancellation
MARGIN_SECONDS = 30.0  # extra time beyond a call's own timeout
MAX_STACKS = 16  # maximum number of workers with stacks in the file
BUSY = 0.05  # minimum CPU use, in cores, of a computing process; waiting workers use up to 0.02
DISK_BYTES = 1 << 20  # disk traffic between two checks that counts as progress; more than log lines
STOPPED = "stopped (SIGSTOP; kill -CONT resumes it)"
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Stall:
    """Which workers block the run, and why."""

    culprits: tuple[WorkerReport, ...]
    verdict: str  # e.g. "the policy worker of rank 1 (pid 7) is stopped; the controller waits for update of policy 1"
    call_timeout: float = 0.0  # timeout in seconds of the workers' active calls; 0: no timeout


def list_awaited(reports: Sequence[WorkerReport]) -> list[WorkerReport]:
    """Return the workers that the controller, the first one, waits for, those of the most recent call first; if there
    are none, the controller."""
    workers = {one.worker: one for one in reports}
    names = dict.fromkeys(call.worker for call in reversed(reports[0].report.calls))
    return [workers[name] for name in names if name in workers] or [reports[0]]


def find_stall(
    before: Sequence[WorkerReport], now: Sequence[WorkerReport], seconds: float, device: Device
) -> Stall | None:
    """Return which workers block the run, or None if there was progress in the `seconds` between two reports of all
    workers, the controller first.

    Progress is a change of a progress counter, disk traffic, or CPU use of an awaited worker. With GPUs, waiting for a
    GPU may use CPU time, so that only other processes count: graders, compilers, and a controller that waits for no
    worker.
    """
    earlier = {one.worker: one.report for one in before if one.report.ticks is not None}
    for name, report in ((one.worker, one.report) for one in now if one.report.ticks is not None):
        then = earlier.get(name, report)
        if report.ticks != then.ticks or report.disk_bytes - then.disk_bytes >= DISK_BYTES:
            return None
    awaited = list_awaited(now)
    if stopped := _find_stopped(awaited) or _find_stopped(now):
        return _describe(now, stopped, f"is {STOPPED}")
    counts_all = device == "cpu" or not any(call.worker for call in now[0].report.calls)
    used = {(one.node, process.pid): process.cpu_seconds for one in before for process in one.report.processes}
    for worker in awaited:
        for process in worker.report.processes:
            seconds_used = process.cpu_seconds - used.get((worker.node, process.pid), process.cpu_seconds)
            if seconds_used >= BUSY * seconds and (counts_all or not process.is_required):
                return None
    if silent := [(worker, worker.name) for worker in awaited if worker.report.ticks is None]:
        return _describe(now, silent, "does not answer")
    # In a collective, all other ranks wait for the ranks with the lowest progress counters.
    ranks = [worker for worker in awaited if worker.role == awaited[0].role]
    lowest = min(worker.report.ticks or 0 for worker in ranks)
    behind = [(worker, worker.name) for worker in ranks if worker.report.ticks == lowest]
    calls = [call for call in behind[0][0].report.calls if not call.worker]
    calls = calls or [call for call in now[0].report.calls if call.worker == behind[0][0].worker]
    shown = [f"{f'{call.count} x ' if call.count > 1 else ''}{call.name} ({call.seconds:.0f} s)" for call in calls]
    timeout = max((call.limit or 0.0 for worker in awaited for call in worker.report.calls), default=0.0)
    return _describe(now, behind, f"waits, in {', '.join(shown) or 'an unknown call'}", timeout)


def _find_stopped(workers: Iterable[WorkerReport]) -> list[tuple[WorkerReport, str]]:
    """Return (worker, name) of the required processes that a signal has stopped."""
    return [
        (worker, worker.name if process.pid == worker.pid else f"{process.name} (pid {process.pid})")
        for worker in workers
        for process in worker.report.processes
        if process.is_stopped and process.is_required
    ]


def _describe(
    now: Sequence[WorkerReport], culprits: Sequence[tuple[WorkerReport, str]], state: str, call_timeout: float = 0.0
) -> Stall:
    calls = now[0].report.calls
    phase = next((call.name for call in calls if not call.worker), "start")
    waits = [f"{call.name} of {call.worker} ({call.seconds:.0f} s)" for call in calls if call.worker]
    names = ", ".join(name for _, name in culprits[:3]) + (f" and {len(culprits) - 3} more" if culprits[3:] else "")
    waiting = f" and waits for {', '.join(waits[:8])}{', ...' if waits[8:] else ''}" if waits else ""
    verdict = f"{names} {state}; the controller is in {phase}{waiting}"
    return Stall(tuple(dict.fromkeys(worker for worker, _ in culprits)), verdict, call_timeout)


class StallMonitor:
    """Async context manager that raises RunStalled out of its block if the run stalls.

    ranks: the workers of all roles. notify: prints one line; called from the monitor's thread. make_resume_hint:
    returns how the run can be resumed. required_pids: name -> pid of the other processes that the run depends on.
    """

    def __init__(
        self,
        ranks: Sequence[Ranks[Any]],
        trainer: RunSettings,
        device: Device,
        notify: Callable[[str], None],
        make_resume_hint: Callable[[], str],
        required_pids: Mapping[str, int] = MappingProxyType({}),
    ):
        self._ranks, self._trainer, self._device = ranks, trainer, device
        self.collect_reports: Callable[[], list[WorkerReport]] = partial(collect_reports, ranks)
        self._notify, self._make_resume_hint = notify, make_resume_hint
        self._required = {pid: name for name, pid in required_pids.items()}
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._check_periodically, name="stall-monitor", daemon=True)
        self._error: RunStalled | None = None
        self._before: tuple[float, list[WorkerReport]] | None = None  # time and reports of the last check
        self._ticks = -1
        self._stalled = 0.0  # seconds since the last progress
        self._is_reported = self._has_failed = False
        self._stopped: set[int] = set()  # pids of required processes that are stopped

    async def __aenter__(self) -> StallMonitor:
        if self._required:
            HEARTBEAT.watch_helper_processes(int, lambda: self._required)
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join(ANSWER_SECONDS)
        if self._error is not None and kind is asyncio.CancelledError:
            _uncancel(self._task)
            raise self._error from None

    def _check_periodically(self) -> None:
        last, tick = time.monotonic(), max(self._trainer.stall_notice_seconds / CHECKS, SHORTEST_TICK)
        while not self._left.wait(tick):
            now = time.monotonic()
            try:  # exclude time in which this thread did not run, because of suspend or Ctrl-Z
                self.check(min(now - last, 2 * tick + ANSWER_SECONDS * (1 + len(self._ranks))))
            except Exception as error:  # noqa: BLE001  the monitor must not end silently
                if not self._has_failed:
                    trace = "".join(traceback.format_exception(error))
                    self._notify(f"the stall monitor failed, which is a bug; it continues:\n{trace}")
                self._has_failed = True
            last = now

    def check(self, elapsed_seconds: float) -> None:
        """Check whether the run has made progress in the given seconds since the last check. If not, report the stall
        or end the run."""
        stopped = {pid for pid in self._required if (process := read_process(pid)) and process.is_stopped}
        for pid in stopped - self._stopped:
            self._notify(f"{self._required[pid]} (pid {pid}) is {STOPPED}")
        self._stopped = stopped
        if HEARTBEAT.ticks != self._ticks:
            self._ticks = HEARTBEAT.ticks
            return self._reset_after_progress()
        self._stalled += elapsed_seconds
        notice, stall_timeout = self._trainer.stall_notice_seconds, self._trainer.stall_timeout
        if self._stalled < notice / 2:
            return None
        before, self._before = self._before, (time.monotonic(), self.collect_reports())
        if before is None:
            return None
        stall = find_stall(before[1], self._before[1], self._before[0] - before[0], self._device)
        if stall is None:
            return self._reset_after_progress()
        timeout = max(stall_timeout or 0.0, stall.call_timeout + MARGIN_SECONDS if stall.call_timeout else 0.0)
        if self._stalled >= notice and not self._is_reported:
            self._is_reported = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._stalled))
            end = f" The run ends after {timeout:.0f} s (trainer.stall_timeout)." if stall_timeout else ""
            self._notify(f"no progress for {self._stalled:.0f} s, since {since}: {stall.verdict}.{end}")
        if stall_timeout and self._stalled >= timeout:
            self._end_run(stall, self._before[1])
        return None

    def _reset_after_progress(self) -> None:
        if self._is_reported:
            self._notify(f"progress again, after {self._stalled:.0f} s")
        self._stalled, self._before, self._is_reported = 0.0, None, False

    def _end_run(self, stall: Stall, reports: Sequence[WorkerReport]) -> None:
        path = self._trainer.folder / "stalls" / time.strftime("%Y-%m-%d_%H-%M-%S.txt")
        shown = list(dict.fromkeys([*stall.culprits, *list_awaited(reports), reports[0]]))[:MAX_STACKS]
        stacks = [f"=== {worker.name}\n{self._collect_stacks(worker)}" for worker in shown]
        written = f"Python stacks are in {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([stall.verdict, "", *stacks]))
        except OSError as error:  # the run must end also if the disk is full
            written = f"Python stacks could not be written ({error})"
        cause = f"no progress for {self._stalled:.0f} s (trainer.stall_timeout): {stall.verdict}"
        names = [culprit.worker for culprit in stall.culprits]
        self._error = RunStalled(f"{cause}. {written}", names, self._make_resume_hint())
        for _ in range(2):  # after the first cancellation the loop may wait for a checkpoint that hangs as well
            if self._left.is_set():  # the block has ended meanwhile
                return
            assert self._task
            self._loop.call_soon_threadsafe(self._task.cancel, CANCELLED_BY_MONITOR)
            self._left.wait(GRACE_SECONDS)
        if not self._left.is_set():
            report_error(self._error, 1)  # the event loop is blocked; the reaper ends all other processes
            os._exit(1)

    def _collect_stacks(self, worker: WorkerReport) -> str:
        """Return a worker's Python stacks. The worker collects them itself if it answers."""
        pids = [process.pid for process in worker.report.processes if process.is_required] or [worker.pid]
        ranks = next((ranks for ranks in self._ranks if ranks.role == worker.role), None)
        if ranks is not None and worker.report.ticks is not None:
            return ranks.collect_stacks(int(worker.worker.rpartition(" ")[2]), pids)
        return f"no stacks: it does not answer on node {worker.node}" if worker.node else dump_stacks(pids)


def collect_reports(all_ranks: Iterable[Ranks[Any]]) -> list[WorkerReport]:
    """Return the reports of the controller and all workers."""
    pid, report = os.getpid(), HEARTBEAT.make_report()
    first, *rest = report.processes
    first = replace(first, cpu_seconds=first.cpu_seconds - time.thread_time())  # exclude this thread
    report = replace(report, processes=(first, *rest))
    controller = WorkerReport("controller", f"the controller (pid {pid})", pid, report)
    return [controller, *(one for ranks in all_ranks for one in ranks.collect_reports(ANSWER_SECONDS))]


@asynccontextmanager
async def limit_idle_start(seconds: float, ranks: Collection[Ranks[Any]]) -> AsyncIterator[None]:
    """Context manager that raises TimeoutError out of its block when the workers that it waits for have used neither
    the CPU nor the disk for `seconds`. A large model may need much longer to load and compile."""

    async def extend_after_progress(limit: asyncio.Timeout) -> None:
        before: list[WorkerReport] = []
        while True:
            await asyncio.sleep(interval := seconds / CHECKS)
            now = await asyncio.to_thread(collect_reports, ranks)
            if before and find_stall(before, now, interval, "cpu") is None:
                limit.reschedule(asyncio.get_running_loop().time() + seconds)
            before = now

    async with asyncio.timeout(seconds) as limit:
        extending = asyncio.create_task(extend_after_progress(limit))
        try:
            yield
        finally:
            extending.cancel()


@asynccontextmanager
async def monitor_processes(required_pids: Mapping[str, int], notify: Callable[[str], None]) -> AsyncIterator[None]:
    """Context manager that raises WorkerDied when a required process dies, instead of the errors that its death causes.

    Ray reports the death of its raylet only after half a minute, and as the death of a worker. If Ray's GCS dies, Ray
    reports nothing and ends the driver a minute later.

    required_pids: name -> pid of the processes. notify: prints a line at once, because Ray may end this process soon.
    """
    task, dead = asyncio.current_task(), ""

    async def poll_processes() -> None:
        nonlocal dead
        while not (dead := find_dead_process(required_pids)):
            await asyncio.sleep(POLL_SECONDS)
        notify(f"{dead} died")
        assert task
        task.cancel(CANCELLED_BY_MONITOR)

    polling = asyncio.create_task(poll_processes())
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        if dead:
            _uncancel(task)
        elif isinstance(error, Exception):  # the process may have died since the last poll
            dead = find_dead_process(required_pids)
        if dead:
            raise WorkerDied(f"{dead} died", "Ray") from None
        raise
    finally:
        polling.cancel()


def find_dead_process(required_pids: Mapping[str, int]) -> str:
    """Return the name and the pid of the first dead process, or "" if all are alive. required_pids: name -> pid."""
    dead = (f"{name} on this machine (pid {pid})" for name, pid in required_pids.items() if not read_process(pid))
    return next(dead, "")


def _uncancel(task: asyncio.Task[Any] | None) -> None:
    while task and task.cancelling():
        task.uncancel()
