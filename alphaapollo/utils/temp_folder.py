"""A command's own folder for temporary files, so that what it and its libraries leave behind is known as its own.

<temp>/alphaapollo-x7k2q9lm/   lock        held by the kernel for as long as the command lives
                               elsewhere   paths that go with the folder: shared memory
                               ray/  pymp-.../  vllm_dist_.../  alphaapollo-sandbox-.../  ...

The command removes it at its end, but where it has failed and Ray's logs in it may say why. What is left over, by that
or by a kill, the next command sweeps up: it takes every lock that nobody holds.
"""

from __future__ import annotations

import fcntl
import getpass
import multiprocessing.forkserver
import multiprocessing.util
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from alphaapollo.utils.watchdog import remove_paths

NAME = re.compile(r"alphaapollo-[a-z0-9_]{8}")
LOCK, ELSEWHERE = "lock", "elsewhere"
SHARED_MEMORY = Path("/dev/shm")
SOCKETS, RAY_SOCKETS = 70, 38  # longest path in which they have room, bytes: that of a socket has 107 in all
WELL = (0, 130)  # exit codes: done, interrupted

_mine: list[Path] = []


def in_own_folder(command: Callable[[], int]) -> int:
    """Call the command and return its exit code; whatever it starts takes its temporary files from a folder that is
    its own, unless sockets would have no room in it."""
    base = Path(tempfile.gettempdir())
    sweep(base)
    folder, lock = _make(base)
    if len(os.fsencode(folder)) > SOCKETS:
        remove_paths([folder])
        os.close(lock)
        return command()
    code: int | None = None
    try:
        with _temporary_files_in(folder, base):
            code = command()
        return code
    finally:
        if code in WELL or not (folder / "ray").exists():
            _remove(folder)
        os.close(lock)


def goes_with_it(paths: Iterable[str | Path]) -> None:
    """Files and folders in shared memory that nobody wants any more once the command has ended."""
    for folder in _mine[-1:]:
        with (folder / ELSEWHERE).open("a") as file:
            file.writelines(f"{path}\n" for path in paths)


def sweep(base: Path) -> None:
    """Remove what dead commands of this user have left in `base`, and what goes with it."""
    for folder in base.glob("alphaapollo-*"):
        with suppress(OSError):  # another sweeps, too
            if NAME.fullmatch(folder.name) and folder.lstat().st_uid == os.getuid():
                _sweep_one(folder)


def _sweep_one(folder: Path) -> None:
    """Unless its command lives."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        noted = (folder / ELSEWHERE).read_text().splitlines() if (folder / ELSEWHERE).exists() else []
        elsewhere = [path for path in map(Path, noted) if path.parent == SHARED_MEMORY]
        remove_paths(elsewhere)
        _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Who is just ending may still write there: then the next command comes back to it."""
    remove_paths([folder])
    if folder.exists():
        (folder / LOCK).touch()


def _make(base: Path) -> tuple[Path, int]:
    """The folder, and its lock. It has another name until that is taken."""
    new = Path(tempfile.mkdtemp(prefix=".alphaapollo-", dir=base))
    lock = os.open(new / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = new.rename(new.with_name(new.name.removeprefix(".")))
    folder.chmod(0o711)  # code in a sandbox may run as another user, in a folder of its own
    return folder, lock


@contextmanager
def _temporary_files_in(folder: Path, base: Path) -> Iterator[None]:
    """tempfile, multiprocessing, Ray and whatever reads TMPDIR; torch's compilations stay where later commands find
    them, and Ray where its sockets have room."""
    own = {"TMPDIR": str(folder)}
    own |= {"TORCHINDUCTOR_CACHE_DIR": str(base / f"torchinductor_{getpass.getuser()}")}
    own |= {"RAY_TMPDIR": str(base)} if len(os.fsencode(folder)) > RAY_SOCKETS else {}
    own = {name: value for name, value in own.items() if name == "TMPDIR" or name not in os.environ}
    before, cached = {name: os.environ.get(name) for name in own}, tempfile.tempdir
    os.environ.update(own)
    tempfile.tempdir = str(folder)
    _mine.append(folder)
    try:
        yield
    finally:
        _mine.remove(folder)
        tempfile.tempdir = cached
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _forget(folder)


def _forget(folder: Path) -> None:
    """multiprocessing keeps the folder of its sockets, and its fork server, for as long as the process lives, which may
    be a notebook's."""
    server: Any = multiprocessing.forkserver._forkserver
    if folder in Path(server._forkserver_address or "/").parents:
        os.close(server._forkserver_alive_fd)  # by which it knows that it may end
        server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None
    util: Any = multiprocessing.util
    for finalizer in list(util._finalizer_registry.values()):
        if finalizer._callback is util._remove_temp_dir and Path(finalizer._args[-1]).parent == folder:
            finalizer()
