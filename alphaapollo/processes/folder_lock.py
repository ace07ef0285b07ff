"""Lock a run's folder, because two processes that write to the same folder would damage each other's files.

The lock is a file beside the folder, `.<name>.lock`, that names the process that holds the lock. The kernel releases
the lock when that process ends, so a leftover file is harmless. If the folder is a symbolic link, both its path and its
target are locked, because a start from scratch moves only the link.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from alphaapollo.utils.disk import read_json
from alphaapollo.utils.json_types import JsonObject

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}  # errors of file systems without locks
TIMEOUT = 0.2  # seconds to retry, because a process that is ending removes its lock file


class FolderInUseError(ValueError):
    """Error for a folder that another process is using. The message names that process."""


@contextmanager
def lock_folder(folder: Path, key: str = "trainer.experiment_name") -> Iterator[None]:
    """Context manager that locks the folder. key: config key with which the user can choose another folder. Raises
    FolderInUseError if another process has locked it, and OSError if the lock file cannot be written."""
    with ExitStack() as stack:
        for path in _list_lock_files(folder):
            for parent in [parent for parent in path.parents if not parent.exists()][::-1]:
                parent.mkdir(exist_ok=True)
                stack.callback(_remove_if_empty, parent)  # a refused run leaves no folders behind
            stack.enter_context(_lock_file(path, folder, key))
            stack.callback(path.unlink, missing_ok=True)  # runs before the lock is released
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
            path.write_text(f"{json.dumps(owner)}\n")
        yield


def read_lock_owner(folder: Path) -> JsonObject | None:
    """Return pid, host and start time (`since`) of the process that has locked the folder; None if it is not locked.

    A process that was killed leaves its lock file behind. An incomplete file, which its owner is writing, is ignored.
    """
    for path in _list_lock_files(folder):
        with suppress(OSError, ValueError):
            owner: JsonObject = read_json(path)
            if isinstance(owner, dict) and owner.keys() >= {"pid", "host", "since"}:
                return owner
    return None


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _list_lock_files(folder: Path) -> list[Path]:
    locked_paths = {folder.parent.resolve() / folder.name, folder.resolve()}
    return [path.with_name(f".{path.name}.lock") for path in sorted(locked_paths)]


@contextmanager
def _lock_file(lock_file: Path, folder: Path, key: str) -> Iterator[None]:
    lock = FileLock(lock_file, mode=0o644, fallback_to_soft=False)
    try:
        lock.acquire(timeout=TIMEOUT)
    except Timeout:
        raise FolderInUseError(_format_in_use_message(folder, key)) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        print(
            f"{folder} is on a file system without locks. Make sure that no second run uses this folder.",
            file=sys.stderr,
        )
    try:
        yield
    finally:
        lock.release()


def _format_in_use_message(folder: Path, key: str) -> str:
    owner = read_lock_owner(folder)
    process = f"process {owner['pid']} on {owner['host']}, since {owner['since']}" if owner else "another process"
    return (
        f"{folder} is in use by {process}. Wait until that run has ended, stop it, or set another {key}: two runs in "
        "the same folder would damage each other's files."
    )
