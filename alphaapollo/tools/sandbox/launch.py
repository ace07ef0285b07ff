"""Starts the pre-forked interpreter, inside bubblewrap or not."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

from alphaapollo.tools.sandbox.child import NOBODY
from alphaapollo.tools.sandbox.preload import PACKAGES
from alphaapollo.tools.sandbox.zygote import SHARED

DISK_BYTES = 256 << 20  # of the temporary file system that all runs share inside bubblewrap
_BOOT = "import sys; sys.path.append(sys.argv[2]); from alphaapollo.tools.sandbox.zygote import main; main()"
_ROOT = Path(__file__).resolve().parents[3]
_OURS = ["alphaapollo/__init__.py", "alphaapollo/tools/__init__.py", "alphaapollo/tools/sandbox"]


def environment() -> dict[str, str]:
    """Nothing of ours: no tokens, no paths. One thread, and the same order of sets in each run."""
    threads = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1")
    python = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "MALLOC_ARENA_MAX": "1"}
    return {**threads, **python, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}


def bubblewrap_missing() -> str:
    """Why bubblewrap cannot be tried; empty if it can."""
    return "" if shutil.which("bwrap") else "it is not installed (package bubblewrap)"


def start(folder: str, bubblewrap: bool, log: IO[bytes]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and the socket on which its zygote reports when it is ready.

    Args:
        folder: for the runs' working folders; inside bubblewrap a temporary file system takes its place.
        log: takes what it writes to stderr.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # its first message says which process it is for us
    python = os.path.realpath(sys.executable)
    packages = package_folders()
    sites = sorted({os.path.dirname(folder) for folder in packages})
    settings = {"sites": sites, "packages": packages, "folder": "/tmp" if bubblewrap else folder}
    command = [python, "-B", "-S", "-s", "-P", "-c", _BOOT, json.dumps(settings), str(_ROOT)]
    if bubblewrap:
        command = [*_bubblewrap(packages), *command]
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment(),
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the program, which closes us
        )
    return process, ours


def package_folders() -> list[str]:
    """Where the packages for snippets are installed, with the shared libraries that came with them."""
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = os.path.dirname(spec.origin)
            found += [path for path in (folder, f"{folder}.libs") if os.path.isdir(path)]
    return found


def _bubblewrap(packages: list[str]) -> list[str]:
    """Own processes, network, users, IPC; a root that has the interpreter and the chosen packages, read-only."""
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--uid",
        str(NOBODY),
        "--gid",
        str(NOBODY),
        "--new-session",
    ]
    # The devices first: a file system of theirs would hide what is bound below it.
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(DISK_BYTES), "--tmpfs", "/tmp"]
    library = os.path.dirname(os.__file__)
    prefix = [os.path.realpath(sys.executable), library, f"{sys.base_prefix}/lib"]
    bound: list[str] = []
    for path in [*SHARED, "/etc/ld.so.cache", *prefix, *packages, *(str(_ROOT / name) for name in _OURS)]:
        if os.path.islink(path) and path in SHARED:
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path) and not any(path.startswith(f"{other}/") or path == other for other in bound):
            command += ["--ro-bind", path, path]
            bound.append(path)
    return [*command, "--remount-ro", "/", "--chdir", "/", "--"]
