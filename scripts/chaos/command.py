"""Training command as seen from outside: its processes by role, its output and its progress."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scripts.chaos.scenes import ROLES, SceneFolders
from scripts.checks import ROOT, last_line

MARKER = "ALPHAAPOLLO_CHAOS"  # environment variable of all processes of a command


class Command:
    """Started main_ppo process.

    run: name of the run's folder. more: additional overrides of this command.
    """

    def __init__(self, folders: SceneFolders, run: str, *more: str):
        self.folders, self.run = folders, run
        self.log = folders.out / folders.scene / f"{run}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.mark = f"{os.getpid()}-{folders.scene}-{run}"
        self.began = time.monotonic()
        self._before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "alphaapollo.trainer.main_ppo", *folders.words(run, *more)],
                cwd=ROOT,
                env=os.environ | {MARKER: self.mark, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Exit code; None while the command is running."""
        return self._process.poll()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def steps(self) -> int:
        """Iterations of the run so far."""
        return self.folders.steps(self.run)

    @property
    def metrics_size(self) -> int:
        """Bytes of the run's metrics so far."""
        path = self.folders.folder(self.run) / "metrics.jsonl"
        return path.stat().st_size if path.is_file() else 0

    def printed(self, since: int = 0) -> str:
        """Output after the first `since` bytes, joined to one line because the console wraps lines."""
        with self.log.open("rb") as file:
            file.seek(self._before + since)
            return " ".join(file.read().decode(errors="replace").split())

    @property
    def size(self) -> int:
        """Bytes of output."""
        return self.log.stat().st_size - self._before

    @property
    def last_line(self) -> str:
        return last_line(self.log.read_text(errors="replace"))

    def processes(self) -> dict[int, str]:
        """Living processes of the command: {pid: command line}."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if f"{MARKER}={self.mark}\0".encode() in (entry / "environ").read_bytes():
                        line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found[int(entry.name)] = line
        return found

    def find(self, role: str, rng: random.Random) -> int | None:
        """A random process of the role; None if there is none (yet)."""
        if role == "driver":
            return self._process.pid
        pids = sorted(pid for pid, line in self.processes().items() if ROLES[role] in line)
        return rng.choice(pids) if pids else None

    def wait_for(self, happens: Callable[[], bool], seconds: float) -> bool:
        """Wait until `happens` (returns True), the command ends, or the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if happens():
                return True
            if self.code is not None:
                return happens()
            time.sleep(0.05)
        return False

    def left_over(self, seconds: float = 40.0) -> list[str]:
        """Command lines of processes that are still alive some time after the end."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        return [line[:60] for line in left.values()]

    def kill(self) -> None:
        """Kill the driver; its child processes end with it."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
