"""Stall detection: which process blocks the run, and whether it hangs or is only slow. Pure functions on two snapshots.

progress     a count has changed, or a disk was busy: there is no stall
stopped      by a signal; named before the processes that wait for it
computing    a process that uses CPU time is slow, not hung. A wait for a GPU may use CPU time, too, so processes that
             use GPUs are judged by their counts only
silent       a worker does not answer
waiting      all workers answer and wait: of the ranks that were called last, those with the fewest counts are named
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema.base import Device
from alphaapollo.utils.heartbeat import ActiveCall, ProcessInfo, ProcessReport

BUSY = 0.05  # share of a core above which a process computes; waiting workers use up to .02
STOPPED = "stopped (SIGSTOP; kill -CONT resumes it)"
DISK_BYTES = 1 << 20  # traffic between two snapshots that counts as progress; a log line is less


@dataclass(frozen=True)
class WorkerSnapshot:
    """One worker, or the controller, at one time."""

    key: str  # policy 1, as in ActiveCall.worker
    name: str  # the policy worker of rank 1 (pid 7)
    report: ProcessReport | None  # None: it does not answer
    process: ProcessInfo | None = None  # of a worker on this machine, even if it does not answer
    is_local: bool = True  # on the controller's machine
    node: str = ""
    pid: int = 0

    @property
    def role(self) -> str:
        return self.key.rpartition(" ")[0]

    @property
    def rank(self) -> int:
        return int(self.key.rpartition(" ")[2])

    @property
    def processes(self) -> Sequence[ProcessInfo]:
        """The known processes, the worker's own first."""
        if self.report:
            return self.report.processes
        return [self.process] if self.process else []

    def name_process(self, process: ProcessInfo) -> str:
        """Name of one of its processes, unique in the run."""
        if process.pid == self.pid:
            return self.name
        return f"{process.name} (pid {process.pid})" + ("" if process.is_required else f" of {self.name}")


@dataclass(frozen=True)
class RunSnapshot:
    """All processes of a run at one time."""

    time: float  # seconds, of the controller's clock
    controller: WorkerSnapshot
    workers: Mapping[str, WorkerSnapshot]  # by key; empty if everything runs in the controller's process

    @property
    def calls(self) -> Sequence[ActiveCall]:
        """Active calls of the controller."""
        return self.controller.report.calls if self.controller.report else ()

    @property
    def awaited_workers(self) -> list[WorkerSnapshot]:
        """Workers that the controller waits for, the last call first."""
        keys = dict.fromkeys(call.worker for call in sorted(self.calls, key=lambda call: call.seconds))
        return [self.workers[key] for key in keys if key in self.workers]

    @property
    def all_workers(self) -> list[WorkerSnapshot]:
        """All workers and the controller, awaited ones first."""
        awaited = self.awaited_workers
        return [*awaited, self.controller, *(one for one in self.workers.values() if one not in awaited)]

    @property
    def phase(self) -> str:
        """Phase of the controller's loop."""
        return next((call.name for call in self.calls if not call.worker), "start")


@dataclass(frozen=True)
class StallFinding:
    """What blocks the run."""

    is_hung: bool  # False: the culprits compute
    culprits: tuple[WorkerSnapshot, ...]
    verdict: str  # the policy worker of rank 1 (pid 7) is stopped
    waiting: str  # the controller is in update and waits for update of policy 0, policy 1 (61 s)
    limit: float = 0.0  # timeout in seconds of what the culprits are in; 0: it has none


NamedProcess = tuple[WorkerSnapshot, str]


def has_progress(before: RunSnapshot, now: RunSnapshot) -> bool:
    """Whether any process has made progress between the two snapshots."""
    for one in now.all_workers:
        earlier = before.controller if one is now.controller else before.workers.get(one.key)
        if earlier and earlier.report and one.report and earlier.report.ticks != one.report.ticks:
            return True
    return any(
        now.disk_bytes - then.disk_bytes >= DISK_BYTES for _, then, now in _pair_processes(before, now, now.all_workers)
    )


def find_stall(before: RunSnapshot, now: RunSnapshot, device: Device) -> StallFinding:
    """Find what blocks the run, between two snapshots without progress."""
    awaited = now.awaited_workers or [now.controller]
    if stopped := _find_stopped(awaited) or _find_stopped(now.all_workers):
        return _make_finding(now, True, stopped, f"is {STOPPED}")
    if computing := _find_computing(before, now, awaited, device):
        return _make_finding(now, False, computing, "computes")
    if silent := [(one, one.name) for one in awaited if one.report is None]:
        return _make_finding(now, True, silent, "does not answer")
    calls = [call for one in awaited if one.report for call in one.report.calls]
    limit = max((call.limit for call in calls if call.limit is not None), default=0.0)
    if helpers := _find_stopped(awaited, is_required=False):
        return _make_finding(now, True, helpers, "is stopped", limit)
    behind = _find_behind(awaited)
    return _make_finding(
        now, True, [(one, one.name) for one in behind], f"waits, {_describe_calls(behind[0], now)}", limit
    )


def _find_stopped(among: Iterable[WorkerSnapshot], is_required: bool = True) -> list[NamedProcess]:
    return [
        (one, one.name_process(process))
        for one in among
        for process in one.processes
        if process.is_stopped and process.is_required is is_required
    ]


def _find_computing(
    before: RunSnapshot, now: RunSnapshot, among: Sequence[WorkerSnapshot], device: Device
) -> list[NamedProcess]:
    seconds = max(now.time - before.time, 1e-9)
    return [
        (one, one.name_process(process))
        for one, then, process in _pair_processes(before, now, among)
        if process.cpu_seconds - then.cpu_seconds >= BUSY * seconds
        and (device == "cpu" or not _can_wait_for_gpu(one, process, now))
    ]


def _can_wait_for_gpu(one: WorkerSnapshot, process: ProcessInfo, now: RunSnapshot) -> bool:
    """Graders, compilers, and a controller that has called no worker do not wait for a GPU."""
    return any(call.worker for call in now.calls) if one is now.controller else process.is_required


def _pair_processes(
    before: RunSnapshot, now: RunSnapshot, among: Iterable[WorkerSnapshot]
) -> Iterator[tuple[WorkerSnapshot, ProcessInfo, ProcessInfo]]:
    """(worker, earlier state, present state) of the processes in both snapshots."""
    earlier = {(one.node, process.pid): process for one in before.all_workers for process in one.processes}
    for one in among:
        for process in one.processes:
            if then := earlier.get((one.node, process.pid)):
                yield one, then, process


def _find_behind(awaited: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Of the role that was called last, the ranks with the fewest counts: in a collective the others wait for them."""
    ticks = {one.key: one.report.ticks for one in awaited if one.report and one.role == awaited[0].role}
    return [one for one in awaited if ticks.get(one.key) == min(ticks.values())]


def _describe_calls(one: WorkerSnapshot, now: RunSnapshot) -> str:
    assert one.report
    calls = [call for call in one.report.calls if not call.worker] or [c for c in now.calls if c.worker == one.key]
    shown = [f"{f'{call.count} x ' if call.count > 1 else ''}{call.name} ({call.seconds:.0f} s)" for call in calls]
    return f"in {', '.join(shown)}" if shown else "in an unknown place"


def _make_finding(
    now: RunSnapshot, is_hung: bool, named: Sequence[NamedProcess], what: str, limit: float = 0.0
) -> StallFinding:
    names = [name for _, name in named]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    by_name: dict[str, list[ActiveCall]] = {}
    for call in now.calls:
        if call.worker:
            by_name.setdefault(call.name, []).append(call)
    pending = [
        f"{name} of {', '.join(call.worker for call in calls[:8])}{', ...' if len(calls) > 8 else ''} "
        f"({max(call.seconds for call in calls):.0f} s)"
        for name, calls in by_name.items()
    ]
    return StallFinding(
        is_hung,
        tuple(dict.fromkeys(one for one, _ in named)),
        f"{', '.join(names[:3])}{more} {what}",
        f"the controller is in {now.phase}" + (f" and waits for {'; '.join(pending)}" if pending else ""),
        limit,
    )
