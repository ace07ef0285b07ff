"""No process outlives the run that started it, and no shared memory does.

A driver that is killed cannot clean up, and signals to process groups do not reach everyone. So each process watches
the one that it works for, and leaves when that one is gone.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_POLL_SECONDS = 0.2  # only where the kernel has no pidfd


def die_with(pid: int, cleanup_paths: Iterable[str | Path] = ()) -> threading.Thread:
    """End this process as soon as process `pid` has ended, after removing `cleanup_paths` (files or folders).

    Returns at once; a daemon thread waits. It ends the process without unwinding (`os._exit(1)`): whoever was to
    receive an error is dead. `pid` must live on this machine and in this process namespace.
    """
    paths = [Path(path) for path in cleanup_paths]
    thread = threading.Thread(target=_wait_and_exit, args=(pid, paths), name=f"die-with-{pid}", daemon=True)
    thread.start()
    return thread


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders; what is already gone is fine."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _wait_and_exit(pid: int, paths: list[Path]) -> None:
    wait_for_exit(pid)
    remove_paths(paths)
    os._exit(1)


def wait_for_exit(pid: int) -> None:
    """Block until process `pid` has ended (at once if there is none)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel or a strict sandbox
        while _exists(pid):
            time.sleep(_POLL_SECONDS)
        return
    with open(descriptor, "rb", buffering=0) as watched:
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        poller.poll()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
