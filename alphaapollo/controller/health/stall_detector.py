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

from collections.abc import Iterable, Iterator, Sequence
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
    report: ProcessTreeReport
    node: str = ""  # empty: the controller's machine
    pid: int = 0

    @property
    def role(self) -> str:
        return self.role_and_rank.rpartition(" ")[0]

    def format_process_name(self, process: ProcessStatus) -> str:
        """Return a name, unique in the run, for one of this worker's processes."""
        if process.pid == self.pid:
            return self.name
        return f"{process.name} (pid {process.pid})" + ("" if process.is_required else f" of {self.name}")


@dataclass(frozen=True)
class RunSnapshot:
    """State of all processes of a run at one time."""

    time: float  # seconds on the controller's monotonic clock
    workers: Sequence[WorkerSnapshot]  # the controller first; no others if they run in its process

    @property
    def calls(self) -> Sequence[ActiveCall]:
        """Active calls of the controller, oldest first."""
        return self.workers[0].report.calls

    @property
    def awaited_workers(self) -> list[WorkerSnapshot]:
        """Workers that the controller waits for, those of the most recent call first; otherwise the controller."""
        names = dict.fromkeys(call.worker for call in sorted(self.calls, key=lambda call: call.seconds))
        workers = {worker.role_and_rank: worker for worker in self.workers}
        return [workers[name] for name in names if name in workers] or [self.workers[0]]


@dataclass(frozen=True)
class StallFinding:
    """Result of stall detection: which workers block the run (`culprits`), and whether they are hung or only slow."""

    is_hung: bool  # False: the culprits compute and are only slow
    culprits: tuple[WorkerSnapshot, ...]
    verdict: str  # e.g. "the policy worker of rank 1 (pid 7) is stopped; the controller waits for update of policy 1"
    call_timeout: float = 0.0  # timeout in seconds of the workers' active calls; 0: no timeout


NamedProcess = tuple[WorkerSnapshot, str]  # a worker, and the name of one of its processes


def has_progress(before: RunSnapshot, now: RunSnapshot) -> bool:
    """Return whether any process of the run has made progress between the two snapshots."""
    earlier = {worker.role_and_rank: worker.report.ticks for worker in before.workers}
    for worker in now.workers:
        if None not in (ticks := (earlier.get(worker.role_and_rank), worker.report.ticks)) and ticks[0] != ticks[1]:
            return True
    return any(
        process.disk_bytes - then.disk_bytes >= DISK_BYTES for _, then, process in _pair_processes(before, now.workers)
    )


def find_stall(before: RunSnapshot, now: RunSnapshot, device: Device) -> StallFinding:
    """Find the processes that block the run, from two snapshots between which there was no progress."""
    awaited = now.awaited_workers
    if stopped := _find_stopped_processes(awaited) or _find_stopped_processes(now.workers):
        return _make_stall_finding(now, True, stopped, f"is {STOPPED}")
    if computing := _find_computing_processes(before, now, device):
        return _make_stall_finding(now, False, computing, "computes")
    if silent := [(worker, worker.name) for worker in awaited if worker.report.ticks is None]:
        return _make_stall_finding(now, True, silent, "does not answer")
    timeout = max((call.limit or 0.0 for worker in awaited for call in worker.report.calls), default=0.0)
    if helpers := _find_stopped_processes(awaited, is_required=False):
        return _make_stall_finding(now, True, helpers, "is stopped", timeout)
    # In a collective, all other ranks wait for the ranks with the lowest progress counters.
    ranks = [worker for worker in awaited if worker.role == awaited[0].role]
    lowest = min(worker.report.ticks or 0 for worker in ranks)
    behind = [(worker, worker.name) for worker in ranks if worker.report.ticks == lowest]
    return _make_stall_finding(now, True, behind, f"waits, in {_describe_active_calls(behind[0][0], now)}", timeout)


def _find_stopped_processes(workers: Iterable[WorkerSnapshot], is_required: bool = True) -> list[NamedProcess]:
    """Return the processes that a signal has stopped: only required ones, or only optional ones if not is_required."""
    return [
        (worker, worker.format_process_name(process))
        for worker in workers
        for process in worker.report.processes
        if process.is_suspended and process.is_required is is_required
    ]


def _find_computing_processes(before: RunSnapshot, now: RunSnapshot, device: Device) -> list[NamedProcess]:
    """Return the awaited processes that used CPU time between the snapshots. With GPUs, a worker may only be waiting
    for a GPU; its graders and compilers are not, and neither is a controller that waits for no worker."""
    seconds, awaited = max(now.time - before.time, 1e-9), now.awaited_workers
    computes = device == "cpu" or not any(call.worker for call in now.calls)
    return [
        (worker, worker.format_process_name(process))
        for worker, then, process in _pair_processes(before, awaited)
        if process.cpu_seconds - then.cpu_seconds >= BUSY * seconds and (computes or not process.is_required)
    ]


def _pair_processes(
    before: RunSnapshot, workers: Iterable[WorkerSnapshot]
) -> Iterator[tuple[WorkerSnapshot, ProcessStatus, ProcessStatus]]:
    """Yield (worker, earlier state, current state) for each process of the workers that is in both snapshots."""
    earlier = {(one.node, process.pid): process for one in before.workers for process in one.report.processes}
    for worker in workers:
        for process in worker.report.processes:
            if then := earlier.get((worker.node, process.pid)):
                yield worker, then, process


def _describe_active_calls(worker: WorkerSnapshot, now: RunSnapshot) -> str:
    """Return e.g. "update (61 s)": the active calls in the worker, or else the controller's calls to it."""
    calls = [call for call in worker.report.calls if not call.worker]
    calls = calls or [call for call in now.calls if call.worker == worker.role_and_rank]
    shown = [f"{f'{call.count} x ' if call.count > 1 else ''}{call.name} ({call.seconds:.0f} s)" for call in calls]
    return ", ".join(shown) or "an unknown call"


def _make_stall_finding(
    now: RunSnapshot, is_hung: bool, culprits: Sequence[NamedProcess], culprit_state: str, call_timeout: float = 0.0
) -> StallFinding:
    names = [name for _, name in culprits]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    phase = next((call.name for call in now.calls if not call.worker), "start")
    calls = [call for call in now.calls if call.worker]
    waits = ", ".join(f"{call.name} of {call.worker}" for call in calls[:8]) + (", ..." if len(calls) > 8 else "")
    state = f" and waits for {waits} ({max(call.seconds for call in calls):.0f} s)" if calls else ""
    verdict = f"{', '.join(names[:3])}{more} {culprit_state}; the controller is in {phase}{state}"
    return StallFinding(is_hung, tuple(dict.fromkeys(worker for worker, _ in culprits)), verdict, call_timeout)
