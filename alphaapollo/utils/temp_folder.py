"""Temporary folder of a command, removed with everything that the command and its libraries leave in it.

<temp>/alphaapollo-x7k2q9lm/   lock       locked as long as the command runs
                               elsewhere  paths in shared memory to remove with the folder
                               ray/  vllm_dist_.../  alphaapollo-sandbox-.../  ...

A command removes its folder at its end, unless it has failed and Ray's logs in the folder may explain the error. The
next command removes the folders of failed and killed commands, i.e. those with a free lock.
"""

from __future__ import annotations

import getpass
import multiprocessing.forkserver
import multiprocessing.process
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from alphaapollo.utils.watchdog import remove_paths

NAME = re.compile(r"alphaapollo-[a-z0-9_]{8}")
LOCK, ELSEWHERE = "lock", "elsewhere"
SHARED_MEMORY = Path("/dev/shm")
SOCKETS, RAY_SOCKETS = 70, 38  # bytes of the longest folder path for sockets: a socket's path has at most 107
CLEAN_EXITS = (0, 130)  # exit codes: done, interrupted

_active: list[Path] = []


def run_in_temp_folder(command: Callable[[], int]) -> int:
    """Call the command and return its exit code. The command and its processes get a temporary folder of their own,
    unless its path would be too long for sockets."""
    base = Path(tempfile.gettempdir())
    remove_stale_folders(base)
    folder, lock = _make_folder(base)
    if len(os.fsencode(folder)) > SOCKETS:
        _remove_folder(folder)
        lock.release()
        return command()
    code: int | None = None
    try:
        with _redirect_temporary_files(folder, base):
            code = command()
        return code
    finally:
        if code in CLEAN_EXITS or not (folder / "ray").exists():
            _remove_folder(folder)
        lock.release()


def register_cleanup(paths: Iterable[str | Path]) -> None:
    """Register paths in shared memory to be removed when the command's temporary folder is removed."""
    for folder in _active[-1:]:
        with (folder / ELSEWHERE).open("a") as file:
            file.writelines(f"{path}\n" for path in paths)


def remove_stale_folders(base: Path) -> None:
    """Remove the folders of this user's dead commands in `base`, and the paths registered in them."""
    for folder in base.glob("alphaapollo-*"):
        with suppress(OSError):  # locked (Timeout), or removed by another command
            if NAME.fullmatch(folder.name) and folder.lstat().st_uid == os.getuid() and (folder / LOCK).exists():
                with FileLock(folder / LOCK, timeout=0):
                    elsewhere = folder / ELSEWHERE
                    paths = map(Path, elsewhere.read_text().splitlines() if elsewhere.exists() else [])
                    remove_paths(path for path in paths if path.parent == SHARED_MEMORY)
                    _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    """Remove the folder. If a process that is ending still writes there, the next command tries again."""
    remove_paths([folder])
    if folder.exists():
        (folder / LOCK).touch()


def _make_folder(base: Path) -> tuple[Path, FileLock]:
    """A locked folder. It has a temporary name until it is locked, so that no other command removes it."""
    new = Path(tempfile.mkdtemp(prefix=".alphaapollo-", dir=base))
    lock = FileLock(new / LOCK)
    lock.acquire()
    folder = new.rename(new.with_name(new.name.removeprefix(".")))
    folder.chmod(0o711)  # sandboxed code may run as another user, in a folder of its own
    return folder, lock


@contextmanager
def _redirect_temporary_files(folder: Path, base: Path) -> Iterator[None]:
    """Redirect tempfile, multiprocessing, Ray and everything that reads TMPDIR. torch keeps its compilation cache where
    later commands find it, and Ray stays in `base` if its sockets' paths would be too long."""
    own = {"TMPDIR": str(folder)}
    own |= {"TORCHINDUCTOR_CACHE_DIR": str(base / f"torchinductor_{getpass.getuser()}")}
    own |= {"RAY_TMPDIR": str(base)} if len(os.fsencode(folder)) > RAY_SOCKETS else {}
    own = {name: value for name, value in own.items() if name == "TMPDIR" or name not in os.environ}
    before, cached = {name: os.environ.get(name) for name in own}, tempfile.tempdir
    multiprocessing_config: Any = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    sockets = multiprocessing_config.get("tempdir")
    _active.append(folder)
    os.environ.update(own)
    tempfile.tempdir = multiprocessing_config["tempdir"] = str(folder)
    try:
        yield
    finally:
        _active.remove(folder)
        tempfile.tempdir, multiprocessing_config["tempdir"] = cached, sockets
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        server: Any = multiprocessing.forkserver._forkserver
        server._stop()  # it has this command's environment
