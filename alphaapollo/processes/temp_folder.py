"""Run a command with its own temporary folder, which is removed with all files that libraries leave in it.

<temp>/alphaapollo-x7k2q9lm/   lock       file that is locked while the command runs
                               elsewhere  file with the paths in shared memory that are removed with the folder
                               ray/  vllm_dist_.../  alphaapollo-sandbox-.../  ...

A command removes its folder at its end. If it failed, it keeps a folder with Ray's logs, which may explain the error.
The next command removes the folders of failed and killed commands, whose lock is free.
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

from alphaapollo.processes.watchdog import remove_paths

NAME = re.compile(r"alphaapollo-[a-z0-9_]{8}")
LOCK, CLEANUP_LIST = "lock", "elsewhere"  # file names
SHARED_MEMORY = Path("/dev/shm")
MAX_PATH, MAX_RAY_PATH = 70, 38  # bytes of the folder's path: paths of the sockets in it have at most 107
CLEAN_EXITS = (0, 130)  # exit codes of a completed and an interrupted command

_active: list[Path] = []


def run_in_temp_folder(command: Callable[[], int]) -> int:
    """Call the command with its own temporary folder and return its exit code.

    If the folder's path would be too long for sockets, the command uses the system's temporary folder.
    """
    base = Path(tempfile.gettempdir())
    remove_stale_folders(base)
    folder, lock = _make_locked_folder(base)
    if len(os.fsencode(folder)) > MAX_PATH:
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
    """Register folders, e.g. in /dev/shm, to be removed together with the command's temporary folder."""
    for folder in _active[-1:]:
        with (folder / CLEANUP_LIST).open("a") as file:
            file.writelines(f"{path}\n" for path in paths)


def remove_stale_folders(base: Path) -> None:
    """Remove folders in `base` that this user's earlier commands left behind, and the paths listed in each folder."""
    for folder in base.glob("alphaapollo-*"):
        with suppress(OSError):  # locked (Timeout), or removed by another command
            if NAME.fullmatch(folder.name) and folder.lstat().st_uid == os.getuid() and (folder / LOCK).exists():
                with FileLock(folder / LOCK, timeout=0):
                    cleanup_list = folder / CLEANUP_LIST
                    paths = map(Path, cleanup_list.read_text().splitlines() if cleanup_list.exists() else [])
                    remove_paths(path for path in paths if path.parent == SHARED_MEMORY)
                    _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    """Remove a temporary folder. If an ending process still writes to it, the next command removes it."""
    remove_paths([folder])
    if folder.exists():
        (folder / LOCK).touch()


def _make_locked_folder(base: Path) -> tuple[Path, FileLock]:
    """Create a temporary folder in `base` and lock it. The folder's name starts with a dot until the folder is locked,
    because other commands remove unlocked folders without a dot."""
    new = Path(tempfile.mkdtemp(prefix=".alphaapollo-", dir=base))
    lock = FileLock(new / LOCK)
    lock.acquire()
    folder = new.rename(new.with_name(new.name.removeprefix(".")))
    folder.chmod(0o711)  # sandboxed code may run as another user in a subfolder
    return folder, lock


@contextmanager
def _redirect_temporary_files(folder: Path, base: Path) -> Iterator[None]:
    """Context manager in which tempfile, multiprocessing, Ray and other users of TMPDIR write to the folder.

    torch's compilation cache stays in `base`, where later commands find it. Ray stays in `base` if its sockets' paths
    would be too long.
    """
    variables = {"TMPDIR": str(folder)}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(base / f"torchinductor_{getpass.getuser()}")}
    variables |= {"RAY_TMPDIR": str(base)} if len(os.fsencode(folder)) > MAX_RAY_PATH else {}
    variables = {name: value for name, value in variables.items() if name == "TMPDIR" or name not in os.environ}
    before, cached = {name: os.environ[name] for name in variables if name in os.environ}, tempfile.tempdir
    multiprocessing_config: Any = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    sockets = multiprocessing_config.get("tempdir")
    _active.append(folder)
    os.environ.update(variables)
    tempfile.tempdir = multiprocessing_config["tempdir"] = str(folder)
    try:
        yield
    finally:
        _active.remove(folder)
        tempfile.tempdir, multiprocessing_config["tempdir"] = cached, sockets
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
        server: Any = multiprocessing.forkserver._forkserver
        server._stop()  # its environment has this command's TMPDIR
