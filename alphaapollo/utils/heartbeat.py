"""Whether this process gets on: what it is in the middle of, how much it has done, and how its processes are.

    with PULSE.doing("grade", limit=10):    # whatever others may have to wait for
        ...
    PULSE.beat()                            # one more micro-batch, token, bucket of weights

Each process has its own. The controller asks for a report when nothing has moved (controller/health/stall_detector.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STOPPED = "T"  # by SIGSTOP; under a debugger it is t
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Doing:
    """Something that goes on, as often as it does at once."""

    what: str  # generate, environment.step, update
    whom: str  # who does it; empty: this process itself
    count: int
    seconds: float  # for which the oldest has
    limit: float | None  # seconds after which it ends by itself, the longest; None: no such limit


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as the kernel has it."""

    pid: int
    name: str
    state: str  # R runs, S sleeps, D waits for a disk, T is stopped, Z has ended
    cpu_seconds: float
    disk_bytes: int  # read and written; 0 where we may not look
    needed: bool = True  # False: it may be replaced (a grader), or is a tool's

    @property
    def stopped(self) -> bool:
        return self.state.upper() == STOPPED


@dataclass(frozen=True, slots=True)
class Report:
    """Of one process and those that work for it."""

    beats: int  # a sum of counts: what matters is that it changes
    doing: tuple[Doing, ...]  # the oldest first
    processes: tuple[Process, ...]  # itself first


class Pulse:
    """What this process does; for any thread of it. Counting costs next to nothing, a report some milliseconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._beats = 0
        self._open: dict[object, tuple[str, str, float, float | None]] = {}
        self._progress: Callable[[], int] = int
        self._helpers: Callable[[], Mapping[int, str]] = dict

    @property
    def beats(self) -> int:
        return self._beats + self._progress()

    def beat(self) -> None:
        """One more of whatever there are many of."""
        self._beats += 1

    def begin(self, what: str, whom: str = "", limit: float | None = None) -> object:
        """This process is in the middle of something, until `end` of what this returns. A beat."""
        key = object()
        self._open[key] = (what, whom, self._clock(), limit)
        self._beats += 1
        return key

    def end(self, key: object) -> None:
        """It is over, or was. A beat."""
        self._open.pop(key, None)
        self._beats += 1

    @contextmanager
    def doing(self, what: str, whom: str = "", limit: float | None = None) -> Iterator[None]:
        """The block is what this process is in the middle of, and a beat at both ends. Blocks overlap as they like."""
        key = self.begin(what, whom, limit)
        try:
            yield
        finally:
            self.end(key)

    def watch(self, progress: Callable[[], int], helpers: Callable[[], Mapping[int, str]]) -> None:
        """What else tells: `progress` changes while somebody gets on; `helpers`: processes without which this one gets
        nowhere, name by pid. The last call counts."""
        self._progress, self._helpers = progress, helpers

    def report(self) -> Report:
        helpers = self._helpers()
        found = [read_process(os.getpid(), "")]
        found += [read_process(pid, name) for pid, name in helpers.items()]
        found += [
            read_process(pid, "", needed=False) for pid in descendants(os.getpid(), *helpers) if pid not in helpers
        ]
        return Report(self.beats, self._doing(), tuple(process for process in found if process))

    def _doing(self) -> tuple[Doing, ...]:
        now, kinds = self._clock(), dict[tuple[str, str], Doing]()
        for what, whom, since, limit in list(self._open.values()):
            one = Doing(what, whom, 1, now - since, limit)
            kinds[what, whom] = joined(kinds.get((what, whom)), one)
        return tuple(sorted(kinds.values(), key=lambda one: -one.seconds))


def joined(before: Doing | None, one: Doing) -> Doing:
    """Both as one."""
    if before is None:
        return one
    limit = None if before.limit is None or one.limit is None else max(before.limit, one.limit)
    return Doing(one.what, one.whom, before.count + one.count, max(before.seconds, one.seconds), limit)


PULSE = Pulse()
"""That of this process."""


def read_process(pid: int, name: str = "", needed: bool = True) -> Process | None:
    """A process of this machine; None: it is gone. Without a name it is called as its command is."""
    try:
        fields = stat(pid)
        name = name or title(pid)
    except OSError:
        return None
    disk = 0
    with suppress(OSError):  # another user's
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        disk = sum(int(line.split()[1]) for line in lines if line.startswith(("read_bytes", "write_bytes")))
    return Process(pid, name, fields[0], (int(fields[11]) + int(fields[12])) / TICKS, disk, needed)


def stat(pid: int) -> list[str]:
    """What the kernel tells of a process after its name, which may hold any bytes: its state, its parent, ..."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def title(pid: int) -> str:
    """What `ps` shows, short: the module of `python -m`, or the first word."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0].split(" ")[0]).name or f"process {pid}"


def descendants(*roots: int) -> list[int]:
    """The processes that these have started, and those that they have started, without the roots."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                children.setdefault(int(stat(int(entry.name))[1]), []).append(int(entry.name))
    found: dict[int, None] = {}
    waiting = list(roots)
    while waiting:
        fresh = [child for child in children.get(waiting.pop(), []) if child not in found and child not in roots]
        found |= dict.fromkeys(fresh)
        waiting += fresh
    return list(found)
