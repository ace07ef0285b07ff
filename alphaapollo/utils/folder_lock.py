"""One driver a folder: two would tear each other's files.

The lock is a file beside the folder, `.<name>.lock`, that says who has it. The kernel gives it up with the process,
however that ends, so a file that is left over is no obstacle. A folder that is a link to another has two names, and
both are locked: to begin anew moves the link alone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}  # some network file systems


class FolderInUseError(ValueError):
    """Another process works in the folder. Says which, and what to do."""


@contextmanager
def lone_driver(folder: Path) -> Iterator[None]:
    """Hold the folder's names for the block.

    Raises:
        FolderInUseError: another process holds it; names that and its machine.
        OSError: nothing can be written there.
    """
    with ExitStack() as held:
        for path in _lock_files(folder):
            held.enter_context(_locked(path, folder))
        yield


def refuse_in_use(folder: Path) -> None:
    """FolderInUseError where another process is at work there: told before what it writes is read. Nothing is held."""
    for path in _lock_files(folder):
        with suppress(OSError):  # there is none, or it is another user's: the work itself will tell
            descriptor = os.open(path, os.O_RDWR)
            try:
                _lock(descriptor, folder)
            finally:
                os.close(descriptor)


def _lock_files(folder: Path) -> list[Path]:
    names = {folder.parent.resolve() / folder.name, folder.resolve()}
    return [name.with_name(f".{name.name}.lock") for name in sorted(names)]


@contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_locked(path, folder)
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(holder)}\n".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(path: Path, folder: Path) -> int:
    """A descriptor of the file at `path`, locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, folder)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has just removed it: the name stands for another file by now


def _lock(descriptor: int, folder: Path) -> None:
    """A record lock, which is this process's own and not its children's: they may outlive it for a moment."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            print(
                f"{folder} lies on a file system without locks: see to it that no second run works there.",
                file=sys.stderr,
            )
        elif error.errno in {errno.EAGAIN, errno.EACCES}:
            raise FolderInUseError(_taken(os.pread(descriptor, 4096, 0), folder)) from None
        else:
            raise


def _taken(text: bytes, folder: Path) -> str:
    try:
        holder = json.loads(text)
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # it is just being written
        who = "another process"
    return (
        f"{folder} is in use: {who}. Two runs would tear each other's files. Wait for it or end it; or set another "
        "trainer.experiment_name."
    )
