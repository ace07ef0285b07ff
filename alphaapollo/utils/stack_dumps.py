"""Python stacks of processes: by py-spy, which can read stopped processes, or by faulthandler for this process."""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TIMEOUT = 20.0  # seconds of py-spy, per process


def dump_stacks(pids: Iterable[int]) -> str:
    """Stacks of processes of this machine, or the reason why there are none."""
    return "\n".join(f"--- process {pid}\n{_dump_stack(pid).strip()}\n" for pid in pids)


def _dump_stack(pid: int) -> str:
    try:
        return _dump_with_py_spy(pid)
    except (OSError, subprocess.SubprocessError) as error:
        return dump_own_stacks() if pid == os.getpid() else f"no stack: {error}"


def _dump_with_py_spy(pid: int) -> str:
    """Stacks of a process. OSError or SubprocessError: there are none."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        raise OSError("py-spy is not installed (pip install py-spy)")
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]  # blocking, it would wait for a stopped process
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        output = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise OSError(f"py-spy failed (it needs permission to trace: root, or kernel.yama.ptrace_scope=0): {output}")
    return done.stdout


def dump_own_stacks() -> str:
    """Stacks of all threads of this process, by faulthandler."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
