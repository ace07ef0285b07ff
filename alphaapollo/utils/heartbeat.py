"""Track the activity of this process to detect hung workers: active calls, a progress counter and subprocesses. In the
iterations that trainer.profile_steps lists, also record spans for a trace.

    with HEARTBEAT.record_call("grade", timeout=10):    # an operation that another process may wait for
        ...
    HEARTBEAT.tick()                           # progress: one micro-batch, token or bucket of weights is done

    with HEARTBEAT.use_track("rollout 0", "train.12.0.3"):     # for this asyncio task and tasks that it starts
        with HEARTBEAT.record_call("generate", tokens=83):     # a span of this track while spans are recorded
            ...

The controller asks for a report when nothing has made progress for a while (controller/stall_monitor.py).
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from alphaapollo.utils.json_types import JsonObject

PY_SPY_SECONDS = 20.0  # time limit of py-spy for one process


@dataclass(frozen=True, slots=True)
class ActiveCall:
    """Operation in progress. Concurrent operations with the same name and worker are counted as one ActiveCall."""

    name: str  # generate, environment.step, update
    worker: str  # called worker, e.g. policy 1; empty: this process
    count: int  # number of these operations
    seconds: float  # running time of the oldest one
    limit: float | None  # longest timeout in seconds; None: no timeout


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """State of one process on this machine."""

    pid: int
    name: str
    is_stopped: bool  # by a signal or a debugger
    cpu_seconds: float
    is_required: bool = True  # False: the run continues without it (a grader, a tool's process)


@dataclass(frozen=True, slots=True)
class Report:
    """Activity of one process and of its subprocesses. The controller, which asks for it, adds the names."""

    ticks: int | None  # progress counter; only its changes are meaningful. None: the process does not answer
    calls: tuple[ActiveCall, ...] = ()  # sorted by age, oldest first
    processes: tuple[ProcessStatus, ...] = ()  # the reporting process first
    disk_bytes: int = 0  # read and written by the reporting process
    stacks: str = ""  # Python stacks of the required processes, if they were asked for
    worker: str = ""  # role and rank, e.g. policy 1, as in ActiveCall.worker
    name: str = ""  # e.g. "the policy worker of rank 1 (pid 7)"
    node: str = ""  # empty: the controller's machine

    @property
    def role(self) -> str:
        return self.worker.rpartition(" ")[0]


@dataclass(frozen=True, slots=True)
class Span:
    """Timed operation, shown as a bar in the trace. Spans of one lane are sequential or nested."""

    track: str  # process or worker, e.g. controller, policy 0, rollout 3
    lane: str  # sequential part of the track, e.g. a thread or an episode
    name: str
    start: float  # unix seconds
    seconds: float
    args: JsonObject = field(default_factory=dict)


_track_and_lane: ContextVar[tuple[str, str]] = ContextVar("track_and_lane", default=("controller", "loop"))


class Heartbeat:
    """Thread-safe activity tracker of one process. A tick costs almost nothing; a report takes a few milliseconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._ticks = 0
        self._open_calls: dict[object, tuple[str, str, float, float | None]] = {}  # name, worker, start, timeout
        self._get_engine_progress: Callable[[], int] = int  # int() is 0
        self._get_helpers: Callable[[], Mapping[int, str]] = dict
        self._recorded: list[Span] | None = None  # None: not recording
        self._zero = 0.0  # unix time of the zero of time.perf_counter

    @property
    def ticks(self) -> int:
        """Progress counter: this process's ticks, call starts and call ends, plus the progress of a watched engine."""
        return self._ticks + self._get_engine_progress()

    def tick(self) -> None:
        """Count one unit of progress."""
        self._ticks += 1

    def begin_call(self, name: str, worker: str = "", timeout: float | None = None) -> object:
        """Record the start of an operation. Returns a key for `end_call`. Counts as progress.

        worker: called worker; empty: this process. timeout: time limit of the operation in seconds; None: no limit.
        """
        key = object()
        self._open_calls[key] = (name, worker, self._clock(), timeout)
        self._ticks += 1
        return key

    def end_call(self, key: object) -> None:
        """Record the end of the operation for which `begin_call` returned this key. Counts as progress."""
        self._open_calls.pop(key, None)
        self._ticks += 1

    @contextmanager
    def record_call(self, name: str, worker: str = "", timeout: float | None = None, **args: object) -> Iterator[None]:
        """Context manager that records its block as an operation (see `begin_call`) and, unless it is a call of another
        worker, as a span. Operations may overlap. args: shown in the trace."""
        recorded, begin = self._recorded, time.perf_counter()
        key = self.begin_call(name, worker, timeout)
        try:
            yield
        finally:
            self.end_call(key)
            if recorded is not None and not worker:
                seconds = time.perf_counter() - begin
                recorded.append(Span(*_track_and_lane.get(), name, self._zero + begin, seconds, args))

    @contextmanager
    def use_track(self, track: str | None = None, lane: str | None = None) -> Iterator[None]:
        """Context manager that sets the track and lane of the spans in its block. None: keep the current value."""
        outer_track, outer_lane = _track_and_lane.get()
        token = _track_and_lane.set((track or outer_track, lane or outer_lane))
        try:
            yield
        finally:
            _track_and_lane.reset(token)

    def start_recording(self) -> None:
        """Start recording spans. Idempotent, since several workers may share a process."""
        if self._recorded is None:
            self._recorded, self._zero = [], time.time() - time.perf_counter()

    def take_spans(self) -> list[Span]:
        """Stop recording and return the recorded spans; empty if not recording."""
        recorded, self._recorded = self._recorded, None
        return recorded or []

    def watch_helper_processes(self, get_progress: Callable[[], int], helpers: Callable[[], Mapping[int, str]]) -> None:
        """Include an engine's progress and helper processes in the reports; a later call replaces them.

        get_progress: returns the engine's progress counter. helpers: returns {pid: name} of required helper processes.
        """
        self._get_engine_progress, self._get_helpers = get_progress, helpers

    def make_report(self, with_stacks: bool = False) -> Report:
        """Return the progress counter, the active calls and the state of this process and its subprocesses."""
        required = {os.getpid(): "", **self._get_helpers()}
        processes = [read_process(pid, name) for pid, name in required.items()]
        processes += [read_process(pid, is_required=False) for pid in list_descendants(*required)]
        disk_bytes, stacks = 0, (dump_stacks(required) if with_stacks else "")
        with suppress(psutil.AccessDenied):  # in some containers
            traffic = psutil.Process().io_counters()
            disk_bytes = traffic.read_bytes + traffic.write_bytes
        return Report(self.ticks, self.list_active_calls(), tuple(filter(None, processes)), disk_bytes, stacks)

    def list_active_calls(self) -> tuple[ActiveCall, ...]:
        now, merged = self._clock(), dict[tuple[str, str], ActiveCall]()
        for name, worker, since, limit in list(self._open_calls.values()):
            count, seconds = 1, now - since
            if same := merged.get((name, worker)):
                count, seconds = count + same.count, max(seconds, same.seconds)
                limit = None if limit is None or same.limit is None else max(limit, same.limit)
            merged[name, worker] = ActiveCall(name, worker, count, seconds, limit)
        return tuple(sorted(merged.values(), key=lambda call: -call.seconds))


HEARTBEAT = Heartbeat()
"""The heartbeat of this process."""


def read_process(pid: int, name: str = "", is_required: bool = True) -> ProcessStatus | None:
    """Return the state of a process on this machine, or None if it has ended. Default name: the module of `python -m`,
    or its program."""
    try:
        process = psutil.Process(pid)
        state, times, words = process.status(), process.cpu_times(), process.cmdline()
    except psutil.NoSuchProcess:
        return None
    if state == psutil.STATUS_ZOMBIE:
        return None
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    program = Path(words[0].split(" ")[0]).name if words else ""
    name = name or module or program or f"process {pid}"
    is_stopped = state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return ProcessStatus(pid, name, is_stopped, times.user + times.system, is_required)


def list_descendants(*roots: int) -> list[int]:
    """Return the pids of all direct and indirect child processes of the processes `roots`."""
    descendants: dict[int, None] = {}
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            descendants |= dict.fromkeys(child.pid for child in psutil.Process(root).children(recursive=True))
    return [pid for pid in descendants if pid not in roots]


def dump_stacks(pids: Iterable[int]) -> str:
    """Return the Python stacks of processes on this machine: of this process by faulthandler, of others by py-spy,
    which also reads stopped processes. If a stack cannot be read, the text says why."""
    return "\n".join(
        f"--- process {pid}\n{(_dump_own_stack() if pid == os.getpid() else _dump_stack(pid)).strip()}\n"
        for pid in pids
    )


def _dump_own_stack() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _dump_stack(pid: int) -> str:
    local = Path(sys.executable).with_name("py-spy")  # in the same virtual environment
    command = [(str(local) if local.exists() else "py-spy"), "dump", "--nonblocking", "--pid", str(pid)]
    try:  # without --nonblocking, py-spy hangs on stopped processes
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if done.returncode == 0:
            return done.stdout
        problem = " ".join(done.stderr.split())
    return f"no stack: py-spy failed: {problem}. Run the command as root, or set kernel.yama.ptrace_scope=0."
