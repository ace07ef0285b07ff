"""Where processes stand, as Python stacks: by py-spy, which also sees into one that is stopped, or by this process's
own faulthandler."""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

SECONDS = 20.0  # that py-spy may take for one process


def stacks_of(pids: Iterable[int]) -> str:
    """The stacks of processes of this machine, one after the other; where there are none, why."""
    return "\n".join(f"--- process {pid}\n{_stack(pid).strip()}\n" for pid in pids)


def _stack(pid: int) -> str:
    text, problem = _py_spy(pid)
    if problem and pid == os.getpid():
        return own_stacks()
    return text or f"no stack: {problem}"


def _py_spy(pid: int) -> tuple[str, str]:
    """(the stacks, "") or ("", why there are none)."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "", "py-spy is not installed (pip install py-spy)"
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]  # blocking, it would wait for who is stopped
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy failed: {error}"
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        return "", f"py-spy failed (it needs the right to trace: root, or kernel.yama.ptrace_scope=0): {said}"
    return done.stdout, ""


def own_stacks() -> str:
    """Of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
