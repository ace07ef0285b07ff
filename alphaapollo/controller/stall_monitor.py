"""Monitor that raises a WorkerLost error out of its block, if the run stalls or a process of Ray dies.

StallMonitor is a thread of the controller, because a worker's call blocks the event loop with trainer.controller=local:

    every half second   look for required processes that are dead or stopped
    every check         read the controller's heartbeat; if there was progress, nothing else is inspected
    no progress         collect reports of all workers, which answer even while they compute
    notice              print one line with the blocking process and its active call
    end                 write stacks to the run's folder, and raise RunStalled or WorkerDied out of the `async with`
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, TracebackType

from alphaapollo.config.errors import report_error
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.controller.errors import CANCELLED_BY_MONITOR, RunStalled, WorkerDied, WorkerLost
from alphaapollo.controller.ranks import Ranks
from alphaapollo.utils.heartbeat import HEARTBEAT, Report, dump_stacks, read_process

CHECKS = 10  # number of checks before a notice
SHORTEST_TICK = 0.5  # minimum seconds between checks, because the kernel counts CPU time in hundredths of a second
POLL_SECONDS = 0.5  # between two checks of the required processes
ANSWER_SECONDS = 5.0  # time after which a worker counts as silent
STACKS_SECONDS = 20.0  # the same, for a report with stacks
GRACE_SECONDS = 30.0  # time for the event loop to end after a cancellation
MARGIN_SECONDS = 30.0  # extra time beyond a call's own timeout
MAX_STACKS = 16  # maximum number of workers with stacks in the file
BUSY = 0.05  # minimum CPU use, in cores, of a computing process; waiting workers use up to 0.02
DISK_BYTES = 1 << 20  # disk traffic between two checks that counts as progress; more than log lines
STOPPED = "stopped (SIGSTOP; kill -CONT resumes it)"


@dataclass(frozen=True)
class Stall:
    """Which workers block the run, and why."""

    culprits: tuple[str, ...]  # e.g. "policy 1", as in Report.worker
    verdict: str  # e.g. "the policy worker of rank 1 (pid 7) is stopped; the controller waits for update of policy 1"
    call_timeout: float = 0.0  # timeout in seconds of the workers' active calls; 0: no timeout


def list_awaited(reports: Sequence[Report]) -> list[Report]:
    """Return the reports of the workers that the controller waits for, the most recent call first, or the controller's
    report if it waits for none. reports: the report of the controller, then those of all workers."""
    workers = {report.worker: report for report in reports}
    names = dict.fromkeys(call.worker for call in reversed(reports[0].calls))
    return [workers[name] for name in names if name in workers] or [reports[0]]


def find_stall(before: Sequence[Report], now: Sequence[Report], seconds: float, device: Device) -> Stall | None:
    """Return which workers block the run, or None if there was progress in the `seconds` between two reports of all
    workers, the controller first.

    Progress is a change of a progress counter, disk traffic, or CPU use of an awaited worker. With GPUs, waiting for a
    GPU may use CPU time, so that only other processes count: graders, compilers, and a controller that waits for no
    worker."""
    earlier = {report.worker: report for report in before if report.ticks is not None}
    for report in now:
        earlier_report = earlier.get(report.worker, report)
        has_used_disk = report.disk_bytes - earlier_report.disk_bytes >= DISK_BYTES
        if report.ticks is not None and (report.ticks != earlier_report.ticks or has_used_disk):
            return None
    awaited = list_awaited(now)
    if stopped := _find_stopped(awaited) or _find_stopped(now):
        return _describe(now, stopped, f"is {STOPPED}")
    counts_required = device == "cpu" or not any(call.worker for call in now[0].calls)
    cpu_before = {(report.node, process.pid): process.cpu_seconds for report in before for process in report.processes}
    for report in awaited:
        for process in report.processes:
            seconds_used = process.cpu_seconds - cpu_before.get((report.node, process.pid), process.cpu_seconds)
            if seconds_used >= BUSY * seconds and (counts_required or not process.is_required):
                return None
    if silent := [(report, report.name) for report in awaited if report.ticks is None]:
        return _describe(now, silent, "does not answer")
    # In a collective, all other ranks wait for the ranks with the lowest progress counters.
    ranks = [report for report in awaited if report.role == awaited[0].role]
    lowest = min(report.ticks or 0 for report in ranks)
    behind = [(report, report.name) for report in ranks if report.ticks == lowest]
    slowest, _ = behind[0]
    calls = [call for call in slowest.calls if not call.worker]
    calls = calls or [call for call in now[0].calls if call.worker == slowest.worker]
    waits = [f"{f'{call.count} x ' if call.count > 1 else ''}{call.name} ({call.seconds:.0f} s)" for call in calls]
    timeout = max((call.limit or 0.0 for report in awaited for call in report.calls), default=0.0)
    return _describe(now, behind, f"waits, in {', '.join(waits) or 'an unknown call'}", timeout)


def _find_stopped(reports: Iterable[Report]) -> list[tuple[Report, str]]:
    """Return (report of the worker, name of the process) for each required process that a signal has stopped."""
    return [
        (report, report.name if process is report.processes[0] else f"{process.name} (pid {process.pid})")
        for report in reports
        for process in report.processes
        if process.is_stopped and process.is_required
    ]


def _describe(
    now: Sequence[Report], culprits: Sequence[tuple[Report, str]], state: str, call_timeout: float = 0.0
) -> Stall:
    calls = now[0].calls  # of the controller
    phase = next((call.name for call in calls if not call.worker), "start")
    waits = [f"{call.name} of {call.worker} ({call.seconds:.0f} s)" for call in calls if call.worker]
    names = ", ".join(name for _, name in culprits[:3]) + (f" and {len(culprits) - 3} more" if culprits[3:] else "")
    waiting = f" and waits for {', '.join(waits[:8])}{', ...' if waits[8:] else ''}" if waits else ""
    verdict = f"{names} {state}; the controller is in {phase}{waiting}"
    return Stall(tuple(dict.fromkeys(report.worker for report, _ in culprits)), verdict, call_timeout)


@dataclass(frozen=True)
class StartLimits:
    """Limits of the start of workers, in place of the `trainer` section. folder: None = no stacks are written."""

    stall_timeout: float
    stall_notice_seconds: float
    folder: None = None


class StallMonitor:
    """Async context manager that raises RunStalled out of its block if the run stalls, and WorkerDied if a required
    process dies, instead of the errors that this death causes.

    Ray reports the death of its raylet only after half a minute, and as the death of a worker. If Ray's GCS dies, Ray
    reports nothing and ends the driver a minute later.

    ranks: the workers of all roles. notify: prints one line; called from the monitor's thread. make_resume_hint:
    returns how the run can be resumed. required_pids: name -> pid of the other processes that the run depends on."""

    def __init__(
        self,
        ranks: Sequence[Ranks[object]],
        limits: RunSettings | StartLimits,
        device: Device,
        notify: Callable[[str], None],
        make_resume_hint: Callable[[], str],
        required_pids: Mapping[str, int] = MappingProxyType({}),
    ):
        self._ranks, self._limits, self._device = ranks, limits, device
        self._notify, self._make_resume_hint, self._required = notify, make_resume_hint, required_pids
        self._block_ended = threading.Event()
        self._thread = threading.Thread(target=self._check_periodically, name="stall-monitor", daemon=True)
        self._error: WorkerLost | None = None
        self._before: tuple[float, list[Report]] | None = None  # time and reports of the last check
        self._ticks = -1
        self._stalled_seconds = 0.0  # since the last progress
        self._is_stall_reported = self._has_failed = False
        self._stopped: set[str] = set()  # required processes that are stopped

    async def __aenter__(self) -> StallMonitor:
        if self._required:
            HEARTBEAT.watch_helper_processes(int, lambda: {pid: name for name, pid in self._required.items()})
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._block_ended.set()
        self._thread.join(ANSWER_SECONDS)
        if isinstance(error, Exception) and (death := self._find_death()):  # a death since the last check
            self._error = death
        has_death = isinstance(self._error, WorkerDied)
        if self._error and (isinstance(error, asyncio.CancelledError) or (has_death and isinstance(error, Exception))):
            while self._task and self._task.cancelling():
                self._task.uncancel()
            raise self._error from None

    def _check_periodically(self) -> None:
        last, tick = time.monotonic(), max(self._limits.stall_notice_seconds / CHECKS, SHORTEST_TICK)
        while not self._block_ended.wait(min(tick, POLL_SECONDS)):
            now = time.monotonic()
            try:
                self.check_required_processes()
                if now - last >= tick:
                    elapsed, last = now - last, now
                    # exclude time in which this thread did not run, because of suspend or Ctrl-Z
                    self.check(min(elapsed, 2 * tick + ANSWER_SECONDS * (1 + len(self._ranks))))
            except Exception as error:  # noqa: BLE001  the monitor must not end silently
                if not self._has_failed:
                    trace = "".join(traceback.format_exception(error))
                    self._notify(f"the stall monitor failed, which is a bug; it continues:\n{trace}")
                self._has_failed = True

    def check_required_processes(self) -> None:
        """Report required processes that a signal has stopped. End the run if one is dead."""
        stopped = {
            name for name, pid in self._required.items() if (process := read_process(pid)) and process.is_stopped
        }
        for name in stopped - self._stopped:
            self._notify(f"{name} (pid {self._required[name]}) is {STOPPED}")
        self._stopped = stopped
        if self._error is None and (death := self._find_death()):
            self._notify(f"{death}; {self._make_resume_hint()}")  # at once, because Ray may end this process soon
            self._error = death
            self._cancel_block()

    def _find_death(self) -> WorkerDied | None:
        for name, pid in self._required.items():
            if not read_process(pid):
                return WorkerDied(f"{name} on this machine (pid {pid}) died", "Ray")
        return None

    def check(self, elapsed_seconds: float) -> None:
        """Check whether the run has made progress in the given seconds since the last check. If not, report the stall
        or end the run."""
        if HEARTBEAT.ticks != self._ticks:
            self._ticks = HEARTBEAT.ticks
            return self._reset_after_progress()
        self._stalled_seconds += elapsed_seconds
        notice, stall_timeout = self._limits.stall_notice_seconds, self._limits.stall_timeout
        if self._stalled_seconds < notice / 2:
            return None
        now, reports = time.monotonic(), self._collect_reports()
        before, self._before = self._before, (now, reports)
        if before is None:
            return None
        earlier, earlier_reports = before
        stall = find_stall(earlier_reports, reports, now - earlier, self._device)
        if stall is None:
            return self._reset_after_progress()
        timeout = max(stall_timeout or 0.0, stall.call_timeout + MARGIN_SECONDS if stall.call_timeout else 0.0)
        if self._stalled_seconds >= notice and not self._is_stall_reported:
            self._is_stall_reported = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._stalled_seconds))
            end = f" The run ends after {timeout:.0f} s (trainer.stall_timeout)." if stall_timeout else ""
            self._notify(f"no progress for {self._stalled_seconds:.0f} s, since {since}: {stall.verdict}.{end}")
        if stall_timeout and self._stalled_seconds >= timeout:
            self._end_stalled_run(stall)
        return None

    def _reset_after_progress(self) -> None:
        if self._is_stall_reported:
            self._notify(f"progress again, after {self._stalled_seconds:.0f} s")
        self._stalled_seconds, self._before, self._is_stall_reported = 0.0, None, False

    def _collect_reports(self, with_stacks: bool = False) -> list[Report]:
        """Return the reports of the controller and all workers."""
        report = HEARTBEAT.make_report(with_stacks)
        first, *rest = report.processes
        first = replace(first, cpu_seconds=first.cpu_seconds - time.thread_time())  # exclude this thread
        name = f"the controller (pid {first.pid})"
        controller = replace(report, worker="controller", name=name, processes=(first, *rest))
        seconds = STACKS_SECONDS if with_stacks else ANSWER_SECONDS
        workers = (worker for ranks in self._ranks for worker in ranks.collect_reports(seconds, with_stacks))
        return [controller, *workers]

    def _end_stalled_run(self, stall: Stall) -> None:
        cause = f"no progress for {self._stalled_seconds:.0f} s (trainer.stall_timeout): {stall.verdict}"
        cause += self._write_stacks(stall)
        self._end_run(RunStalled(cause, stall.culprits, self._make_resume_hint()))

    def _write_stacks(self, stall: Stall) -> str:
        """Write the Python stacks of the blocking workers, the awaited workers and the controller to a file.
        Returns the end of the error message, which names this file."""
        if self._limits.folder is None:
            return ""
        path = self._limits.folder / "stalls" / time.strftime("%Y-%m-%d_%H-%M-%S.txt")
        reports = self._collect_reports(with_stacks=True)
        culprits = [report for report in reports if report.worker in stall.culprits]
        by_worker = {report.worker: report for report in [*culprits, *list_awaited(reports), reports[0]]}
        stacks = [f"=== {report.name}\n{_get_stacks(report)}" for report in list(by_worker.values())[:MAX_STACKS]]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([stall.verdict, "", *stacks]))
        except OSError as error:  # the run must end even if the disk is full
            return f". Python stacks could not be written ({error})"
        return f". Python stacks are in {path}"

    def _cancel_block(self) -> None:
        assert self._task
        self._loop.call_soon_threadsafe(self._task.cancel, CANCELLED_BY_MONITOR)

    def _end_run(self, error: WorkerLost) -> None:
        self._error = error
        for _ in range(2):  # twice, because a cancelled block may wait for a checkpoint, which may hang as well
            if self._block_ended.is_set():
                return
            self._cancel_block()
            self._block_ended.wait(GRACE_SECONDS)
        if not self._block_ended.is_set():
            report_error(error, 1)  # the event loop is blocked; the reaper ends all other processes
            os._exit(1)


def _get_stacks(report: Report) -> str:
    """Return a worker's Python stacks. If the worker does not answer, they are read from outside on this machine."""
    if report.ticks is not None:
        return report.stacks
    pids = [process.pid for process in report.processes if process.is_required]
    return f"no stacks: it does not answer on node {report.node}" if report.node else dump_stacks(pids)
