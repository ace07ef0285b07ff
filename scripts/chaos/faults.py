"""Faults injected into a run at random times, and their outcomes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from alphaapollo.runs.checkpoint_folder import MANIFEST, CheckpointFolder
from scripts.chaos.command import Command

PROGRESS_TIMEOUT = 240.0  # seconds within which a command must make progress or end


@dataclass(frozen=True)
class Fault:
    """Fault injected into a command, and its outcome."""

    kind: str  # kill, stop, damage, fill
    target: str  # a role, a kind of damage, or the disk
    at: float  # seconds since the start of the command
    step: int  # completed iterations at that time
    outcome: str  # "resumed", "exited with 1", ...
    seconds: float  # until the outcome
    problem: str = ""  # empty: as expected


def kill(command: Command, role: str, rng: random.Random) -> Fault | None:
    """Send SIGKILL to a process of the role. None: there is no such process."""
    if (pid := command.find(role, rng)) is None:
        return None
    at, step, size, start = command.seconds, command.steps, command.size, time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    went_on = command.wait_for(makes_progress(command), PROGRESS_TIMEOUT)
    seconds = time.monotonic() - start
    if command.code is None or command.code == 0:
        problem = "" if went_on or command.code == 0 else f"no iteration in {PROGRESS_TIMEOUT:.0f} s"
        said = command.printed(size)
        outcome = "restarted" if "(trainer.max_restarts)" in said else "resumed"
        outcome = "replaced" if "It starts again with version" in said and outcome == "resumed" else outcome
        return Fault("kill", role, at, step, outcome, seconds, problem)
    outcome = f"exited with {command.code}"
    if role == "driver":
        return Fault("kill", role, at, step, outcome, seconds)
    said = command.last_line
    named = role in said.lower() or str(pid) in said
    problem = "" if named and "Traceback" not in command.printed(size) else f"target not in the message: {said[:200]}"
    return Fault("kill", role, at, step, outcome, seconds, problem)


def makes_progress(command: Command) -> Callable[[], bool]:
    """Return a function that reports whether an iteration has started and ended since this call.

    The metrics file must change twice: one line may have been in flight, and resuming from a checkpoint removes lines.
    """
    sizes: list[int] = []

    def changed_twice() -> bool:
        if (size := command.metrics_size) not in sizes[-1:]:
            sizes.append(size)
        return len(sizes) > 2

    changed_twice()
    return changed_twice


def stop(command: Command, role: str, rng: random.Random) -> Fault | None:
    """Send SIGSTOP to a process of the role, and SIGCONT when it is reported.

    A stopped grader may go unnoticed because there are several. None: there is no such process, or the run ended
    without it.
    """
    if (pid := command.find(role, rng)) is None:
        return None
    at, step, size, start = command.seconds, command.steps, command.size, time.monotonic()
    progresses, words = makes_progress(command), re.compile(rf"\(pid {pid}\)( of [^;]*)? is stopped")
    os.kill(pid, signal.SIGSTOP)
    ends = [lambda: bool(words.search(command.printed(size)))] + [progresses] * (role == "grader")
    named = command.wait_for(lambda: any(end() for end in ends), PROGRESS_TIMEOUT)
    seconds = time.monotonic() - start
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    if not named and command.code == 0:
        return None
    if not named:
        return Fault("stop", role, at, step, "not reported", seconds, command.last_line[:200])
    went_on = command.wait_for(makes_progress(command), PROGRESS_TIMEOUT) or command.code == 0
    return Fault("stop", role, at, step, "reported, resumed", seconds, "" if went_on else "did not resume")


def damage(checkpoints: Path, rng: random.Random) -> tuple[str, str]:
    """Damage one file of the newest complete checkpoint. Returns the kind of damage and the path in the checkpoint."""
    newest = CheckpointFolder(checkpoints, None).list_completed()[-1]
    path = rng.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    whole = ["gone", "empty"] if content else ["gone"]
    how = rng.choice(whole if path.name == MANIFEST else [*whole, "bit", "cut"])  # a bit there is another file's digest
    if how == "gone":
        path.unlink()
    elif how == "bit":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    else:
        path.write_bytes(content[: rng.randrange(len(content)) if how == "cut" else 0])
    return how, str(path.relative_to(newest))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """Mount a file system of that size at the folder. Yields False if this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=False)
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def enlarge(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
