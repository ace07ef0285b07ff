"""Dump Python stacks of processes with py-spy, which also reads stopped processes, or with faulthandler."""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TIMEOUT = 20.0  # seconds per process, for py-spy


def dump_stacks(pids: Iterable[int]) -> str:
    """Return the Python stacks of processes on this machine. If a stack cannot be read, the text says why."""
    return "\n".join(f"--- process {pid}\n{_dump_stack(pid).strip()}\n" for pid in pids)


def _dump_stack(pid: int) -> str:
    try:
        return _dump_with_py_spy(pid)
    except (OSError, subprocess.SubprocessError) as error:
        return dump_own_stacks() if pid == os.getpid() else f"no stack: {error}"


def _dump_with_py_spy(pid: int) -> str:
    """Return the Python stacks of a process. Raises OSError or SubprocessError if py-spy cannot read them."""
    local = Path(sys.executable).with_name("py-spy")  # in the same virtual environment
    program = str(local) if local.exists() else shutil.which("py-spy")
    if program is None:
        raise OSError("py-spy is not installed (pip install py-spy)")
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]  # otherwise hangs on stopped processes
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        output = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise OSError(f"py-spy failed: {output}. Run the command as root, or set kernel.yama.ptrace_scope=0.")
    return done.stdout


def dump_own_stacks() -> str:
    """Return the stacks of all threads of this process, by faulthandler."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
