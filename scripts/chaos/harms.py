"""What is done to a run, at an instant drawn from the seed, and what came of it."""

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

from alphaapollo.launch.checkpoint_folder import MANIFEST, CheckpointFolder
from scripts.chaos.command import Command

PATIENCE = 240.0  # seconds until a command must have gone on or ended


@dataclass(frozen=True)
class Harm:
    """One thing done to one command."""

    what: str  # kill, stop, damage, fill
    whom: str  # a role, or a file
    at: float  # seconds from the command's beginning
    step: int  # iterations done by then
    became: str  # "went on", "ended with 1", ...
    seconds: float  # until then
    problem: str = ""  # empty: as promised


def kill(command: Command, role: str, rng: random.Random) -> Harm | None:
    """kill -9. None: there is no such process now."""
    if (pid := command.find(role, rng)) is None:
        return None
    at, step, size, start = command.seconds, command.steps, command.size, time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    went_on = command.wait_for(goes_on(command), PATIENCE)
    seconds = time.monotonic() - start
    if command.code is None or command.code == 0:
        problem = "" if went_on or command.code == 0 else f"no iteration in {PATIENCE:.0f} s"
        return Harm("kill", role, at, step, "went on", seconds, problem)
    became = f"ended with {command.code}"
    if role == "driver":
        return Harm("kill", role, at, step, became, seconds)
    said = command.last_line
    named = role in said.lower() or str(pid) in said
    problem = "" if named and "Traceback" not in command.printed(size) else f"not named: {said[:200]}"
    return Harm("kill", role, at, step, became, seconds, problem)


def goes_on(command: Command) -> Callable[[], bool]:
    """Asked again and again: has an iteration begun and ended since the first time? Its metrics have changed twice:
    one line may have been on its way, and who goes back to a checkpoint takes lines off."""
    sizes: list[int] = []

    def changed_twice() -> bool:
        if (size := command.metrics_size) not in sizes[-1:]:
            sizes.append(size)
        return len(sizes) > 2

    changed_twice()
    return changed_twice


def stop(command: Command, role: str, rng: random.Random) -> Harm | None:
    """SIGSTOP, and SIGCONT once it is named; of graders there are several, and nobody may wait for this one. None:
    there is no such process now, or the run came to its end without it."""
    if (pid := command.find(role, rng)) is None:
        return None
    at, step, size, start = command.seconds, command.steps, command.size, time.monotonic()
    unheeded, words = goes_on(command), re.compile(rf"\(pid {pid}\)( of [^;]*)? is stopped")
    os.kill(pid, signal.SIGSTOP)
    ends = [lambda: bool(words.search(command.printed(size)))] + [unheeded] * (role == "grader")
    named = command.wait_for(lambda: any(end() for end in ends), PATIENCE)
    seconds = time.monotonic() - start
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    if not named and command.code == 0:
        return None
    if not named:
        return Harm("stop", role, at, step, "was not named", seconds, command.last_line[:200])
    went_on = command.wait_for(goes_on(command), PATIENCE) or command.code == 0
    return Harm("stop", role, at, step, "named, went on", seconds, "" if went_on else "did not go on")


def damage(checkpoints: Path, rng: random.Random) -> tuple[str, str]:
    """Spoil one file of the newest whole checkpoint; how, and which, by its path in the checkpoint."""
    newest = CheckpointFolder(checkpoints, None).completed()[-1]
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
    """A file system of that size in the folder; false: this user may not make one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=False)
    try:
        yield made.returncode == 0
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def enlarge(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
