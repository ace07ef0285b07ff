"""Start, watch and stop the zygote from outside."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from alphaapollo.tools.sandbox.child import MESSAGE_BYTES, NOBODY_UID
from alphaapollo.tools.sandbox.preload import PACKAGES
from alphaapollo.tools.sandbox.types import SandboxError
from alphaapollo.tools.sandbox.zygote import SHARED, remove_tree

START_TIMEOUT = 120.0  # seconds until the zygote has imported everything
DISK_BYTES = 256 << 20  # of the temporary file system that all runs share in bubblewrap
ENVIRONMENT = {  # nothing of this process's; one thread, and the same order of sets in each run
    **dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1"),
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "MALLOC_ARENA_MAX": "1",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
}
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BOOT = "import sys; sys.path.append(sys.argv[2]); from alphaapollo.tools.sandbox.zygote import main; main()"
_ROOT = Path(__file__).resolve().parents[3]
_OWN_FILES = ["alphaapollo/__init__.py", "alphaapollo/tools/__init__.py", "alphaapollo/tools/sandbox"]


class ZygoteProcess:
    """A running zygote, in bubblewrap or not. Raises SandboxError if it does not start.

    `socket` carries messages to it and exit notices from it. `facts`: which of landlock, seccomp and setuid are
    available.
    """

    def __init__(self, bubblewrap: bool):
        self.folder = "" if bubblewrap else tempfile.mkdtemp(prefix="alphaapollo-sandbox-")
        if self.folder:
            os.chmod(self.folder, 0o711)  # the runs' own folders in it belong to the user that they run as
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        self._pidfd: int | None = None  # of the zygote itself: killing bubblewrap leaves it running
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the first message carries the zygote's pid
        with theirs:
            self.process = subprocess.Popen(
                _command(self.folder, bubblewrap),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # Ctrl-C reaches only the main program, which then closes the sandbox
            )
        try:
            self.facts = self._wait_until_ready()
        except SandboxError:
            self.end()
            raise

    def last_log_line(self) -> str:
        """`: ` and the last line that it wrote to stderr, or nothing."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""

    def kill(self) -> None:
        """Kill the zygote, and with it its children."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> None:
        """Kill the zygote and remove everything that belongs to it."""
        self.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self.socket.close()
        self._log.close()
        if self.folder:
            with contextlib.suppress(FileNotFoundError):  # the zygote removed it
                remove_tree(self.folder)

    def _wait_until_ready(self) -> dict[str, bool]:
        self.socket.settimeout(START_TIMEOUT)
        message = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            message, control, _, _ = self.socket.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        if not message:
            raise SandboxError(f"the pre-forked interpreter does not start{self.last_log_line()}")
        self.socket.settimeout(None)
        (pid, _, _) = _CREDENTIALS.unpack(control[0][2])
        self._pidfd = os.pidfd_open(pid)
        facts: dict[str, bool] = json.loads(message)
        return facts


def package_folders() -> list[str]:
    """Folders of the packages for snippets, and of the shared libraries installed with them."""
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = os.path.dirname(spec.origin)
            found += [path for path in (folder, f"{folder}.libs") if os.path.isdir(path)]
    return found


def _command(folder: str, bubblewrap: bool) -> list[str]:
    """`folder`: for the working folders of the runs; in bubblewrap a temporary file system replaces it."""
    packages = package_folders()
    sites = sorted({os.path.dirname(package) for package in packages})
    settings = {"sites": sites, "packages": packages, "folder": folder or "/tmp"}
    python = os.path.realpath(sys.executable)
    command = [python, "-B", "-S", "-s", "-P", "-c", _BOOT, json.dumps(settings), str(_ROOT)]
    return [*_bubblewrap(packages), *command] if bubblewrap else command


def _bubblewrap(packages: list[str]) -> list[str]:
    """Own process, network, user and IPC namespaces; a read-only root with the interpreter and the chosen packages."""
    user = ["--uid", str(NOBODY_UID), "--gid", str(NOBODY_UID)]
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", *user, "--new-session"]
    # Device file systems first: they would hide what is bound below them.
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(DISK_BYTES), "--tmpfs", "/tmp"]
    prefix = [os.path.realpath(sys.executable), os.path.dirname(os.__file__), f"{sys.base_prefix}/lib"]
    bound: list[str] = []
    for path in [*SHARED, "/etc/ld.so.cache", *prefix, *packages, *(str(_ROOT / name) for name in _OWN_FILES)]:
        if os.path.islink(path) and path in SHARED:
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path) and not any(path.startswith(f"{other}/") or path == other for other in bound):
            command += ["--ro-bind", path, path]
            bound.append(path)
    return [*command, "--remount-ro", "/", "--chdir", "/", "--"]
