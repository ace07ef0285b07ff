"""Parents and children of processes."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def exit_with_parent(parent_pid: int, signal_number: int) -> None:
    """Make the kernel send a signal to this process when its parent dies (Linux only). Exits if it has already died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent_pid:
            os._exit(0)


def list_child_pids(pid: int) -> list[int]:
    """Return the pids of a process's direct children; empty if the process has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while its file is read
        return []
