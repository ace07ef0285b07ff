"""Controller thread that detects a stalled run, reports which process blocks it, and ends the run after a timeout.

    every check   read the controller's heartbeat; if there was progress, nothing else is inspected
    no progress   take snapshots of all workers, which answer even while they compute (separate Ray concurrency group)
    notice        print one line with the blocking process and its active call (stall_detector.py)
    timeout       write stacks to the run's folder, and raise RunStalled out of the `async with`

The monitor is a thread because a worker's call blocks the event loop with trainer.controller=local.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any

from alphaapollo.config.errors import report_error
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.controller.health.stall_detector import (
    STOPPED,
    RunSnapshot,
    StallFinding,
    WorkerSnapshot,
    find_stall,
    has_progress,
)
from alphaapollo.controller.ranks import CANCELLED_BY_MONITOR, Ranks, RunStalled
from alphaapollo.utils.heartbeat import HEARTBEAT, dump_stacks, read_process

CHECKS = 10  # number of checks before a notice
SHORTEST_TICK = 0.5  # minimum seconds between checks, because the kernel counts CPU time in hundredths of a second
ANSWER_SECONDS = 5.0  # time after which a worker counts as silent
GRACE_SECONDS = 30.0  # time for the event loop to end after a cancellation
MARGIN_SECONDS = 30.0  # extra time beyond a call's own timeout
MAX_STACKS = 16  # maximum number of workers with stacks in the file


class StallMonitor:
    """Async context manager that raises RunStalled out of its block if the run stalls.

    Args:
        ranks: the workers of all roles.
        notify: prints one line; called from the monitor's thread.
        make_resume_hint: returns how the run can be resumed, for the error message.
        required_pids: name -> pid of the processes, besides the workers, that the run depends on. A stopped process is
            reported even if the run makes progress.
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
        self._ranks, self._device, self._folder = ranks, device, trainer.folder
        self._notice, self._timeout = trainer.stall_notice_seconds, trainer.stall_timeout
        self._notify, self._make_resume_hint = notify, make_resume_hint
        self._tick = max(self._notice / CHECKS, SHORTEST_TICK)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._check_progress_periodically, name="stall-monitor", daemon=True)
        self._error: RunStalled | None = None
        self._before: RunSnapshot | None = None
        self._ticks = -1
        self._stalled = 0.0  # seconds since the last progress
        self._idle = 0.0  # seconds since the last progress or computation
        self._reported: set[bool] = set()  # StallFinding.is_hung of the findings reported in this stall
        self._has_failed = False
        self._required = {pid: name for name, pid in required_pids.items()}
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
            assert self._task
            while self._task.cancelling():
                self._task.uncancel()
            raise self._error from None

    def _check_progress_periodically(self) -> None:
        last = time.monotonic()
        while not self._left.wait(self._tick):
            now = time.monotonic()
            try:  # exclude time in which this thread did not run, because of suspend or Ctrl-Z
                self.check_progress(min(now - last, 2 * self._tick + ANSWER_SECONDS))
            except Exception as error:  # noqa: BLE001  the monitor must not end silently
                if not self._has_failed:
                    self._has_failed = True
                    trace = "".join(traceback.format_exception(error))
                    self._notify(f"the stall monitor failed, which is a bug; it continues:\n{trace}")
            last = now

    def check_progress(self, elapsed_seconds: float) -> None:
        """Check whether the run has made progress in the given seconds since the last check. If not, report the stall
        or end the run."""
        stopped = {pid for pid in self._required if (process := read_process(pid)) and process.is_suspended}
        for pid in stopped - self._stopped:
            self._notify(f"{self._required[pid]} (pid {pid}) is {STOPPED}")
        self._stopped = stopped
        if HEARTBEAT.ticks != self._ticks:
            self._ticks = HEARTBEAT.ticks
            self._reset_after_progress()
            return
        self._stalled += elapsed_seconds
        self._idle += elapsed_seconds
        if self._stalled < self._notice / 2:
            return
        now = self.take_snapshot()
        before, self._before = self._before, now
        if before is None:
            return
        if has_progress(before, now):
            self._reset_after_progress()
            self._before = now
            return
        finding = find_stall(before, now, self._device)
        if not finding.is_hung:
            self._idle = 0.0
        if self._stalled >= self._notice and finding.is_hung not in self._reported:
            self._reported.add(finding.is_hung)
            self._notify(self._format_stall_notice(finding))
        if (timeout := self._get_stall_timeout(finding)) is not None and self._idle >= timeout:
            self._end_run(finding, now)

    def _reset_after_progress(self) -> None:
        if self._reported:
            self._notify(f"progress again, after {self._stalled:.0f} s")
        self._stalled = self._idle = 0.0
        self._before = None
        self._reported.clear()

    def _get_stall_timeout(self, finding: StallFinding) -> float | None:
        """Return the seconds without progress after which the run ends: trainer.stall_timeout, or the timeout of the
        workers' active calls (plus a margin) if it is longer. None: the run never ends because of a stall."""
        if self._timeout is None or not finding.call_timeout:
            return self._timeout
        return max(self._timeout, finding.call_timeout + MARGIN_SECONDS)

    def _format_stall_notice(self, finding: StallFinding) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._stalled))
        text = f"no progress for {self._stalled:.0f} s, since {since}: {finding.verdict}."
        if finding.is_hung and (timeout := self._get_stall_timeout(finding)) is not None:
            text += f" The run ends after {timeout:.0f} s (trainer.stall_timeout)."
        return text

    def _end_run(self, finding: StallFinding, now: RunSnapshot) -> None:
        self._error = RunStalled(
            f"no progress for {self._idle:.0f} s (trainer.stall_timeout): {finding.verdict}. "
            f"{self._write_stacks(finding, now)}",
            [culprit.role_and_rank for culprit in finding.culprits],
            self._make_resume_hint(),
        )
        if self._left.is_set():  # the block has ended meanwhile
            return
        assert self._task
        for _ in range(2):  # after the first cancellation the loop may wait for a checkpoint that hangs as well
            self._loop.call_soon_threadsafe(self._task.cancel, CANCELLED_BY_MONITOR)
            if self._left.wait(GRACE_SECONDS):
                return
        report_error(self._error, 1)  # the event loop is blocked; the reaper ends all other processes
        os._exit(1)

    def _write_stacks(self, finding: StallFinding, now: RunSnapshot) -> str:
        """Write the Python stacks of blocking and waiting workers to a file. Returns a sentence with its path."""
        path = self._folder / "stalls" / time.strftime("%Y-%m-%d_%H-%M-%S.txt")
        shown = list(dict.fromkeys([*finding.culprits, *now.awaited_workers, now.workers[0]]))[:MAX_STACKS]
        stacks = [f"=== {worker.name}\n{self._collect_stacks(worker)}" for worker in shown]
        text = "\n".join([finding.verdict, "", *stacks])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            return f"Python stacks could not be written ({error})"
        return f"Python stacks are in {path}"

    def _collect_stacks(self, worker: WorkerSnapshot) -> str:
        """Return a worker's Python stacks. The worker collects them itself if it answers."""
        pids = [process.pid for process in worker.report.processes if process.is_required] or [worker.pid]
        ranks = next((ranks for ranks in self._ranks if ranks.role == worker.role), None)
        if ranks is not None and worker.report.ticks is not None:
            return ranks.collect_stacks(int(worker.role_and_rank.rpartition(" ")[2]), pids)
        return f"no stacks: it does not answer on node {worker.node}" if worker.node else dump_stacks(pids)

    def take_snapshot(self) -> RunSnapshot:
        """Collect heartbeat reports from all workers into a snapshot."""
        end = time.monotonic() + ANSWER_SECONDS
        for ranks in self._ranks:
            ranks.request_heartbeat_reports()
        workers = [one for ranks in self._ranks for one in ranks.take_snapshots(max(end - time.monotonic(), 0.0))]
        pid, report = os.getpid(), HEARTBEAT.make_process_tree_report()
        first, *rest = report.processes
        first = replace(first, cpu_seconds=first.cpu_seconds - time.thread_time())  # exclude this thread
        report = replace(report, processes=(first, *rest))
        controller = WorkerSnapshot("controller", f"the controller (pid {pid})", report, pid=pid)
        return RunSnapshot(time.monotonic(), [controller, *workers])
