"""Nothing has moved for a while: who is to blame, and is he stuck or only slow? Pure: two looks in, a finding out.

moved        a count has changed, or a disk was at work: there is nothing to find
stopped      by a signal: whoever waits for it is not to blame
computing    who uses the CPU gets on, if slowly; but a wait for a GPU may use it, so there only counts count
silent       it does not even answer
behind       all answer and wait: those that are waited for last, and of them who has done least
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alphaapollo.config.schema.base import Device
from alphaapollo.utils.heartbeat import Doing, Process, Report

BUSY = 0.05  # of a core: who uses less waits. A worker that waits was seen to use up to .02
STOPPED = "stopped (SIGSTOP; kill -CONT lets it go on)"
DISK_BYTES = 1 << 20  # between two looks; a log line is less


@dataclass(frozen=True)
class Seen:
    """One process at one look: a worker, or the controller."""

    key: str  # policy 1: as Doing.whom names it
    name: str  # the policy worker of rank 1 (pid 7)
    report: Report | None  # None: it does not answer
    process: Process | None = None  # of one that does not answer, where it is on this machine
    here: bool = True  # it is on the controller's machine
    node: str = ""
    pid: int = 0

    @property
    def role(self) -> str:
        return self.key.rpartition(" ")[0]

    @property
    def rank(self) -> int:
        return int(self.key.rpartition(" ")[2])

    @property
    def processes(self) -> Sequence[Process]:
        """Itself first, where anything is known."""
        if self.report:
            return self.report.processes
        return [self.process] if self.process else []

    def name_of(self, process: Process) -> str:
        """What it is called among all processes of the run."""
        if process.pid == self.pid:
            return self.name
        return f"{process.name} (pid {process.pid})" + ("" if process.needed else f" of {self.name}")


@dataclass(frozen=True)
class Look:
    """All processes at one time."""

    at: float  # seconds, of the controller's clock
    controller: Seen
    workers: Mapping[str, Seen]  # by key; none where all is in one process

    @property
    def doing(self) -> Sequence[Doing]:
        """Of the controller."""
        return self.controller.report.doing if self.controller.report else ()

    @property
    def awaited(self) -> list[Seen]:
        """The workers that the controller waits for, the last call first."""
        keys = dict.fromkeys(one.whom for one in sorted(self.doing, key=lambda one: one.seconds))
        return [self.workers[key] for key in keys if key in self.workers]

    @property
    def everyone(self) -> list[Seen]:
        """Those that are waited for first."""
        awaited = self.awaited
        return [*awaited, self.controller, *(one for one in self.workers.values() if one not in awaited)]

    @property
    def phase(self) -> str:
        """What the controller's loop is at."""
        return next((one.what for one in self.doing if not one.whom), "start")


@dataclass(frozen=True)
class Finding:
    """Who holds everybody up."""

    stuck: bool  # else it computes
    culprits: tuple[Seen, ...]
    verdict: str  # the policy worker of rank 1 (pid 7) is stopped
    waiting: str  # the controller waits in update for update of policy 0, policy 1 (61 s)
    limit: float  # seconds within which something ends by itself; 0: nothing does


def moved(before: Look, now: Look) -> bool:
    """Somebody has done something between the two."""
    for one in now.everyone:
        earlier = before.controller if one is now.controller else before.workers.get(one.key)
        if earlier is None or earlier.report is None or one.report is None:
            continue
        if earlier.report.beats != one.report.beats:
            return True
    return any(now.disk_bytes - then.disk_bytes >= DISK_BYTES for _, then, now in _pairs(before, now, now.everyone))


def judge(before: Look, now: Look, device: Device) -> Finding:
    """Between the two looks nothing has moved."""
    awaited = now.awaited or [now.controller]
    stopped = _stopped(awaited) or _stopped(now.everyone)
    if stopped:
        return _finding(now, True, stopped, f"is {STOPPED}")
    if computing := _computing(before, now, awaited, device):
        return _finding(now, False, computing, "computes")
    silent = [(one, one.name) for one in awaited if one.report is None]
    if silent:
        return _finding(now, True, silent, "does not answer")
    limits = [kind.limit for one in awaited if one.report for kind in one.report.doing if kind.limit is not None]
    limit = max(limits, default=0.0)
    if helpers := _stopped(awaited, needed=False):
        return _finding(now, True, helpers, "is stopped", limit)
    behind = _behind(awaited)
    return _finding(now, True, [(one, one.name) for one in behind], f"waits, {_middle(behind[0], now)}", limit)


Named = tuple[Seen, str]


def _stopped(among: Iterable[Seen], needed: bool = True) -> list[Named]:
    return [
        (one, one.name_of(process))
        for one in among
        for process in one.processes
        if process.stopped and process.needed is needed
    ]


def _computing(before: Look, now: Look, among: Sequence[Seen], device: Device) -> list[Named]:
    seconds = max(now.at - before.at, 1e-9)
    return [
        (one, one.name_of(process))
        for one, then, process in _pairs(before, now, among)
        if process.cpu_seconds - then.cpu_seconds >= BUSY * seconds
        and (device == "cpu" or not _may_spin(one, process, now))
    ]


def _may_spin(one: Seen, process: Process, now: Look) -> bool:
    """Waiting for a GPU may use the CPU; graders, compilers and a controller that called nobody have none."""
    return any(kind.whom for kind in now.doing) if one is now.controller else process.needed


def _pairs(before: Look, now: Look, among: Iterable[Seen]) -> Iterator[tuple[Seen, Process, Process]]:
    """(whose, then, now) of the processes that were there both times."""
    then = {(one.node, process.pid): process for one in before.everyone for process in one.processes}
    for one in among:
        for process in one.processes:
            if earlier := then.get((one.node, process.pid)):
                yield one, earlier, process


def _behind(awaited: Sequence[Seen]) -> list[Seen]:
    """Of the role that was called last, who has done least: in a collective the others wait for these."""
    called = [one for one in awaited if one.role == awaited[0].role]
    least = min(one.report.beats for one in called if one.report)
    return [one for one in called if one.report and one.report.beats == least]


def _middle(one: Seen, now: Look) -> str:
    """In the middle of what it is."""
    assert one.report
    doing = [kind for kind in one.report.doing if not kind.whom] or [kind for kind in now.doing if kind.whom == one.key]
    return f"in {', '.join(map(_shown, doing))}" if doing else "in nothing that is known"


def _shown(kind: Doing) -> str:
    times = f"{kind.count} x " if kind.count > 1 else ""
    return f"{times}{kind.what} ({kind.seconds:.0f} s)"


def _finding(now: Look, stuck: bool, named: Sequence[Named], what: str, limit: float = 0.0) -> Finding:
    culprits = tuple(dict.fromkeys(one for one, _ in named))
    names = [name for _, name in named]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    calls: dict[str, list[Doing]] = {}
    for one in now.doing:
        if one.whom:
            calls.setdefault(one.what, []).append(one)
    asked = [
        f"{what} of {', '.join(one.whom for one in kinds[:8])}{', ...' if len(kinds) > 8 else ''} "
        f"({max(one.seconds for one in kinds):.0f} s)"
        for what, kinds in calls.items()
    ]
    return Finding(
        stuck,
        culprits,
        f"{', '.join(names[:3])}{more} {what}",
        f"the controller is in {now.phase}" + (f" and waits for {'; '.join(asked)}" if asked else ""),
        limit,
    )
