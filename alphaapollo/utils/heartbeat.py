"""Activity of this process: the calls that it is in, a count that grows as it makes progress, and its subprocesses.

    with HEARTBEAT.call("grade", limit=10):    # anything that others may wait for
        ...
    HEARTBEAT.tick()                           # one more micro-batch, token, bucket of weights

The controller asks for a report when nothing has made progress for a while (controller/health/stall_monitor.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class ActiveCall:
    """Calls of one name that are running at the same time."""

    name: str  # generate, environment.step, update
    worker: str  # the worker that was called, e.g. policy 1; empty: this process itself
    count: int
    seconds: float  # for which the oldest has been running
    limit: float | None  # timeout of the call in seconds, the longest; None: no timeout


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """State of a process of this machine."""

    pid: int
    name: str
    state: str  # psutil's: running, sleeping, disk-sleep, stopped, ...
    cpu_seconds: float
    disk_bytes: int  # read and written; 0 without permission
    is_required: bool = True  # False: it can be replaced (a grader), or belongs to a tool

    @property
    def is_stopped(self) -> bool:
        return self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """Activity of one process and of the processes that work for it."""

    ticks: int  # a sum of counts; only a change of it means anything
    calls: tuple[ActiveCall, ...]  # the oldest first
    processes: tuple[ProcessInfo, ...]  # the process itself first


class Heartbeat:
    """Activity of one process, for any of its threads. Counting costs next to nothing, a report some milliseconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ticks = 0
        self._open: dict[object, tuple[str, str, float, float | None]] = {}
        self._progress: Callable[[], int] = int
        self._helpers: Callable[[], Mapping[int, str]] = dict

    @property
    def ticks(self) -> int:
        return self._ticks + self._progress()

    def tick(self) -> None:
        """Count one unit of progress."""
        self._ticks += 1

    def begin(self, name: str, worker: str = "", limit: float | None = None) -> object:
        """Begin a call, which `end` of the returned key ends. Counts as progress."""
        key = object()
        self._open[key] = (name, worker, self._clock(), limit)
        self._ticks += 1
        return key

    def end(self, key: object) -> None:
        """End a call. Counts as progress."""
        self._open.pop(key, None)
        self._ticks += 1

    @contextmanager
    def call(self, name: str, worker: str = "", limit: float | None = None) -> Iterator[None]:
        """Run the block as a call. Calls may overlap."""
        key = self.begin(name, worker, limit)
        try:
            yield
        finally:
            self.end(key)

    def watch(self, progress: Callable[[], int], helpers: Callable[[], Mapping[int, str]]) -> None:
        """Set further sources of progress; the last call counts.

        Args:
            progress: a count that changes with progress elsewhere.
            helpers: name by pid of processes that this one depends on.
        """
        self._progress, self._helpers = progress, helpers

    def report(self) -> ProcessReport:
        own, helpers = os.getpid(), self._helpers()
        others = [pid for pid in list_descendants(own, *helpers) if pid not in helpers]
        found = [read_process(own)]
        found += [read_process(pid, name) for pid, name in helpers.items()]
        found += [read_process(pid, is_required=False) for pid in others]
        return ProcessReport(self.ticks, self._active_calls(), tuple(process for process in found if process))

    def _active_calls(self) -> tuple[ActiveCall, ...]:
        now, merged = self._clock(), dict[tuple[str, str], ActiveCall]()
        for name, worker, since, limit in list(self._open.values()):
            count, seconds = 1, now - since
            if before := merged.get((name, worker)):
                count, seconds = count + before.count, max(seconds, before.seconds)
                limit = None if limit is None or before.limit is None else max(limit, before.limit)
            merged[name, worker] = ActiveCall(name, worker, count, seconds, limit)
        return tuple(sorted(merged.values(), key=lambda call: -call.seconds))


HEARTBEAT = Heartbeat()
"""The heartbeat of this process."""


def read_process(pid: int, name: str = "", is_required: bool = True) -> ProcessInfo | None:
    """A process of this machine, by default named by its command; None: it has ended."""
    disk = 0
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            with suppress(psutil.AccessDenied):
                traffic = process.io_counters()
                disk = traffic.read_bytes + traffic.write_bytes
            name = name or _shorten_command(process)
            return ProcessInfo(pid, name, process.status(), times.user + times.system, disk, is_required)
    except psutil.NoSuchProcess:
        return None


def _shorten_command(process: psutil.Process) -> str:
    """The module of `python -m`, or the program."""
    words = process.cmdline()
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return (Path(words[0].split(" ")[0]).name if words else "") or f"process {process.pid}"


def list_descendants(*roots: int) -> list[int]:
    """pids of the processes that these have started, directly or not, without the roots."""
    found: dict[int, None] = {}
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            found |= dict.fromkeys(child.pid for child in psutil.Process(root).children(recursive=True))
    return [pid for pid in found if pid not in roots]
