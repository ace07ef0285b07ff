"""Stall detection: decide from two snapshots which process blocks the run, and whether it is hung or slow.

The cases, in this order:
    progress     the progress counter of a process (its heartbeat) has changed, or a disk was busy: there is no stall
    stopped      a process was stopped by a signal
    computing    a process that uses CPU time is slow, not hung. For processes that use GPUs this does not
                 count, because waiting for a GPU may use CPU time, too
    silent       a worker does not answer
    waiting      all workers answer and wait: of the ranks that were called last, those with the least progress block
                 the run
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema.base import Device
from alphaapollo.utils.heartbeat import ActiveCall, ProcessStatus, ProcessTreeReport

BUSY = 0.05  # minimum CPU use, in cores, of a computing process; waiting workers use up to 0.02
STOPPED = "stopped (SIGSTOP; kill -CONT resumes it)"
DISK_BYTES = 1 << 20  # disk traffic between two snapshots that counts as progress; more than log lines


@dataclass(frozen=True)
class WorkerSnapshot:
    """State of one worker, or of the controller, at one time."""

    role_and_rank: str  # e.g. "policy 1", as in ActiveCall.worker
    name: str  # e.g. "the policy worker of rank 1 (pid 7)"
    report: ProcessTreeReport | None  # None: the worker does not answer
    process: ProcessStatus | None = None  # state of a worker on this machine, even if the worker does not answer
    is_local: bool = True  # whether it runs on the controller's machine
    node: str = ""
    pid: int = 0

    @property
    def role(self) -> str:
        return self.role_and_rank.rpartition(" ")[0]

    @property
    def rank(self) -> int:
        return int(self.role_and_rank.rpartition(" ")[2])

    @property
    def processes(self) -> Sequence[ProcessStatus]:
        """The worker's process and, if the worker has reported them, its subprocesses."""
        if self.report:
            return self.report.processes
        return [self.process] if self.process else []

    def format_process_name(self, process: ProcessStatus) -> str:
        """Return a name, unique in the run, for one of this worker's processes."""
        if process.pid == self.pid:
            return self.name
        return f"{process.name} (pid {process.pid})" + ("" if process.is_required else f" of {self.name}")


@dataclass(frozen=True)
class RunSnapshot:
    """State of all processes of a run at one time."""

    time: float  # seconds on the controller's monotonic clock
    controller: WorkerSnapshot
    workers: Mapping[str, WorkerSnapshot]  # by role_and_rank; empty if all workers run in the controller's process

    @property
    def calls(self) -> Sequence[ActiveCall]:
        """Active calls of the controller, oldest first."""
        return self.controller.report.calls if self.controller.report else ()

    @property
    def awaited_workers(self) -> list[WorkerSnapshot]:
        """Workers that the controller waits for, those of the most recent call first."""
        names = dict.fromkeys(call.worker for call in sorted(self.calls, key=lambda call: call.seconds))
        return [self.workers[name] for name in names if name in self.workers]

    @property
    def all_workers(self) -> list[WorkerSnapshot]:
        """All workers and the controller: first the awaited workers, then the controller, then the other workers."""
        awaited = self.awaited_workers
        return [*awaited, self.controller, *(worker for worker in self.workers.values() if worker not in awaited)]


@dataclass(frozen=True)
class StallFinding:
    """Result of stall detection: which workers block the run (`culprits`), and whether they are hung or only slow."""

    is_hung: bool  # False: the culprits compute and are only slow
    culprits: tuple[WorkerSnapshot, ...]
    verdict: str  # e.g. "the policy worker of rank 1 (pid 7) is stopped"
    controller_state: str  # e.g. "the controller is in update and waits for update of policy 0, policy 1 (61 s)"
    call_timeout: float = 0.0  # timeout in seconds of the workers' active calls; 0: no timeout


NamedProcess = tuple[WorkerSnapshot, str]  # a worker, and the name of one of its processes


def has_progress(before: RunSnapshot, now: RunSnapshot) -> bool:
    """Return whether any process of the run has made progress between the two snapshots."""
    for worker in now.all_workers:
        earlier = before.controller if worker is now.controller else before.workers.get(worker.role_and_rank)
        if earlier and earlier.report and worker.report and earlier.report.ticks != worker.report.ticks:
            return True
    return any(
        now.disk_bytes - then.disk_bytes >= DISK_BYTES for _, then, now in _pair_processes(before, now, now.all_workers)
    )


def find_stall(before: RunSnapshot, now: RunSnapshot, device: Device) -> StallFinding:
    """Find the processes that block the run, from two snapshots between which there was no progress."""
    awaited = now.awaited_workers or [now.controller]
    if stopped := _find_stopped_processes(awaited) or _find_stopped_processes(now.all_workers):
        return _make_stall_finding(now, True, stopped, f"is {STOPPED}")
    if computing := _find_computing_processes(before, now, awaited, device):
        return _make_stall_finding(now, False, computing, "computes")
    if silent := [(worker, worker.name) for worker in awaited if worker.report is None]:
        return _make_stall_finding(now, True, silent, "does not answer")
    calls = [call for worker in awaited if worker.report for call in worker.report.calls]
    timeout = max((call.limit for call in calls if call.limit is not None), default=0.0)
    if helpers := _find_stopped_processes(awaited, is_required=False):
        return _make_stall_finding(now, True, helpers, "is stopped", timeout)
    behind = _find_lagging_ranks(awaited)
    state = f"waits, {_describe_active_calls(behind[0], now)}"
    return _make_stall_finding(now, True, [(worker, worker.name) for worker in behind], state, timeout)


def _find_stopped_processes(workers: Iterable[WorkerSnapshot], is_required: bool = True) -> list[NamedProcess]:
    """Return the processes that a signal has stopped: only required ones, or only optional ones if not is_required."""
    return [
        (worker, worker.format_process_name(process))
        for worker in workers
        for process in worker.processes
        if process.is_suspended and process.is_required is is_required
    ]


def _find_computing_processes(
    before: RunSnapshot, now: RunSnapshot, workers: Sequence[WorkerSnapshot], device: Device
) -> list[NamedProcess]:
    """Return the processes that used CPU time between the snapshots, without those that may be waiting for a GPU."""
    seconds = max(now.time - before.time, 1e-9)
    return [
        (worker, worker.format_process_name(process))
        for worker, then, process in _pair_processes(before, now, workers)
        if process.cpu_seconds - then.cpu_seconds >= BUSY * seconds
        and (device == "cpu" or not _may_be_waiting_for_gpu(worker, process, now))
    ]


def _may_be_waiting_for_gpu(worker: WorkerSnapshot, process: ProcessStatus, now: RunSnapshot) -> bool:
    """Return whether a process's CPU use may only be busy-waiting for a GPU. False for e.g. graders and compilers."""
    return any(call.worker for call in now.calls) if worker is now.controller else process.is_required


def _pair_processes(
    before: RunSnapshot, now: RunSnapshot, workers: Iterable[WorkerSnapshot]
) -> Iterator[tuple[WorkerSnapshot, ProcessStatus, ProcessStatus]]:
    """Yield (worker, earlier state, current state) for each process of the workers that is in both snapshots."""
    earlier = {(worker.node, process.pid): process for worker in before.all_workers for process in worker.processes}
    for worker in workers:
        for process in worker.processes:
            if then := earlier.get((worker.node, process.pid)):
                yield worker, then, process


def _find_lagging_ranks(awaited: Sequence[WorkerSnapshot]) -> list[WorkerSnapshot]:
    """Return the ranks with the lowest progress counters, among the ranks of the first awaited worker's role. In a
    collective, all other ranks wait for these ranks."""
    ticks = {
        worker.role_and_rank: worker.report.ticks
        for worker in awaited
        if worker.report and worker.role == awaited[0].role
    }
    return [worker for worker in awaited if ticks.get(worker.role_and_rank) == min(ticks.values())]


def _describe_active_calls(worker: WorkerSnapshot, now: RunSnapshot) -> str:
    """Return e.g. "in update (61 s)": the active calls in the worker, or else the controller's calls to it."""
    assert worker.report
    calls = [call for call in worker.report.calls if not call.worker] or [
        call for call in now.calls if call.worker == worker.role_and_rank
    ]
    shown = [f"{f'{call.count} x ' if call.count > 1 else ''}{call.name} ({call.seconds:.0f} s)" for call in calls]
    return f"in {', '.join(shown)}" if shown else "in an unknown call"


def _make_stall_finding(
    now: RunSnapshot, is_hung: bool, culprits: Sequence[NamedProcess], culprit_state: str, call_timeout: float = 0.0
) -> StallFinding:
    phase = next((call.name for call in now.calls if not call.worker), "start")
    names = [name for _, name in culprits]
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
        tuple(dict.fromkeys(worker for worker, _ in culprits)),
        f"{', '.join(names[:3])}{more} {culprit_state}",
        f"the controller is in {phase}" + (f" and waits for {'; '.join(pending)}" if pending else ""),
        call_timeout,
    )
