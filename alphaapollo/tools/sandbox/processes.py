"""Processes of the sandbox, seen from the program: the zygote, and a child of it for each snippet or session."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from alphaapollo.tools.sandbox.child import DONE, MESSAGE_BYTES, READY, ChildSpec
from alphaapollo.tools.sandbox.execute import EXIT_MEMORY
from alphaapollo.tools.sandbox.linux import NOBODY_UID
from alphaapollo.tools.sandbox.preload import PACKAGES
from alphaapollo.tools.sandbox.types import (
    OutputCapture,
    SandboxError,
    SandboxRequest,
    SandboxResult,
    Status,
    format_mode,
    format_signal,
)
from alphaapollo.tools.sandbox.zygote import CONTINUE, KILL, SHARED, STOP, remove_tree

START_TIMEOUT = 120.0  # seconds until the zygote has imported everything
FORK_TIMEOUT = 30.0  # seconds until a child is ready
KILL_TIMEOUT = 10.0  # seconds until a killed child is gone
CANCEL_SECONDS = 0.2  # between two checks whether the caller has cancelled a run
SESSION_CPU_SECONDS = 3600
OUTPUT_STOP_BYTES = 16 << 20  # of one run, after which it is stopped
DISK_BYTES = 256 << 20  # of the temporary file system that all runs share in bubblewrap
ENVIRONMENT = {  # nothing of this process's; one thread, and the same order of sets in each run
    **dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1"),
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "MALLOC_ARENA_MAX": "1",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
}
_CHUNK = 1 << 16
_MAX_MESSAGES = 64  # of a session's process, discarded before its next snippet
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BOOT = "import sys; sys.path.append(sys.argv[2]); from alphaapollo.tools.sandbox.zygote import main; main()"
_ROOT = Path(__file__).resolve().parents[3]
_SANDBOX_FILES = ["alphaapollo/__init__.py", "alphaapollo/tools/__init__.py", "alphaapollo/tools/sandbox"]


class ZygoteProcess:
    """A running zygote, in bubblewrap or not. Raises SandboxError if it does not start.

    `facts`: which of landlock, seccomp and setuid are available.
    """

    def __init__(self, bubblewrap: bool):
        self.folder = "" if bubblewrap else tempfile.mkdtemp(prefix="alphaapollo-sandbox-")
        if self.folder:
            os.chmod(self.folder, 0o711)  # the runs' own folders in it belong to the user that they run as
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        self._pidfd: int | None = None  # of the zygote itself: killing bubblewrap leaves it running
        self._lock = threading.RLock()  # nothing is sent after `end`
        self._is_closed = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the first message carries the zygote's pid
        with theirs:
            self.process = subprocess.Popen(
                _build_command(self.folder, bubblewrap),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # Ctrl-C reaches only the main program, which then closes the sandbox
            )
        self.facts = self._wait_until_ready()

    @property
    def has_ended(self) -> bool:
        return self._is_closed or self.process.poll() is not None

    def fork(self, spec: ChildSpec, descriptors: list[int]) -> None:
        """Ask for a child with these descriptors: notice, control, stdin, stdout, stderr."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(asdict(spec)).encode()], descriptors)
            except OSError as error:
                raise SandboxError(self.end()) from error

    def kill(self) -> None:
        """Kill the zygote, and with it its children."""
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> str:
        """Kill the zygote, remove everything that belongs to it, and return why it ended. Idempotent."""
        with self._lock:
            if self._is_closed:
                return "the sandbox is closed"
            self._is_closed = True
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            self.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            if self._pidfd is not None:
                os.close(self._pidfd)
            self._socket.close()
            self._log.close()
            if self.folder:
                with contextlib.suppress(FileNotFoundError):  # the zygote removed it
                    remove_tree(self.folder)
            return f"the pre-forked interpreter failed{f': {lines[-1][:300]}' if lines else ''}"

    def _wait_until_ready(self) -> dict[str, bool]:
        self._socket.settimeout(START_TIMEOUT)
        message = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            message, control, _, _ = self._socket.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        if not message:
            raise SandboxError(self.end())
        self._socket.settimeout(None)
        (pid, _, _) = _CREDENTIALS.unpack(control[0][2])
        self._pidfd = os.pidfd_open(pid)
        facts: dict[str, bool] = json.loads(message)
        return facts


class SnippetProcess:
    """A child of the zygote that runs one snippet, or the snippets of a session one after the other.

    The code goes through a control socket and a memory file. The result comes from the child's pipes, the control
    socket and the zygote's notice of its end. Used by one thread at a time.

    Raises SandboxError if the child does not start.
    """

    def __init__(self, zygote: ZygoteProcess, layers: Collection[str], request: SandboxRequest):
        self._zygote = zygote
        self._mode = format_mode(layers)
        self._is_session = bool(request.session)
        self._selector = selectors.PollSelector()
        self._notice, notice = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (out, out_write), (err, err_write) = os.pipe(), os.pipe()
        self._out, self._err = open(out, "rb", buffering=0), open(err, "rb", buffering=0)  # noqa: SIM115
        for file in (self._notice, self._control, self._out, self._err):
            os.set_blocking(file.fileno(), False)
        cpu_seconds = SESSION_CPU_SECONDS if self._is_session else math.ceil(request.timeout) + 1
        spec = ChildSpec(sorted(layers), request.memory_mb, cpu_seconds, self._is_session)
        stdin = make_memory_file(request.stdin)
        try:
            with notice, control, stdin, open(out_write, "wb") as stdout, open(err_write, "wb") as stderr:
                zygote.fork(spec, [file.fileno() for file in (notice, control, stdin, stdout, stderr)])
            self._wait_until_ready()  # the ends of the child are closed here, so that its death is noticed
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        return self._notice.fileno() == -1 or self._notice in self._wait(0)

    def close(self) -> None:
        """Close the connections, upon which the zygote kills the process. Idempotent."""
        for file in (self._notice, self._control, self._out, self._err):
            file.close()

    def run(self, request: SandboxRequest, is_cancelled: Callable[[], bool]) -> SandboxResult:
        """Run one snippet. Only the process of a session, after a snippet that ended by itself, can run another one."""
        out, err = OutputCapture(request.max_output), OutputCapture(request.max_output)
        try:
            start = time.monotonic()
            self._send_code(request)
            status, reason = self._wait_for_end(request.timeout, out, err, is_cancelled)
        except BaseException:
            self.close()
            raise
        return SandboxResult(status, out.text(), err.text(), time.monotonic() - start, self._mode, reason)

    def _wait_until_ready(self) -> None:
        for file in (self._notice, self._control):
            self._selector.register(file, selectors.EVENT_READ)
        self._wait(FORK_TIMEOUT)
        if _receive_message(self._control) != READY:
            self._selector.unregister(self._control)
            self._send_order(KILL)
            self._wait(KILL_TIMEOUT)
            notice = self._read_notice()
            text = notice["stop_reason"] or (self._err.read(_CHUNK) or b"").decode(errors="replace").strip()
            raise SandboxError(f"a process could not be isolated: {text or notice['status']}")
        for stream in (self._out, self._err):
            self._selector.register(stream, selectors.EVENT_READ)

    def _send_code(self, request: SandboxRequest) -> None:
        if self._is_session:  # discard what the process sent after its last snippet
            for _ in range(_MAX_MESSAGES):
                if not _receive_message(self._control):
                    break
            self._drain(OutputCapture(0), OutputCapture(0))
            self._send_order(CONTINUE)
        gone_or_full = (BrokenPipeError, BlockingIOError)  # the deadline ends such a run
        with make_memory_file(request.code) as code, contextlib.suppress(*gone_or_full):
            socket.send_fds(self._control, [json.dumps({"echo": request.echo}).encode()], [code.fileno()])

    def _wait_for_end(
        self, timeout: float, out: OutputCapture, err: OutputCapture, is_cancelled: Callable[[], bool]
    ) -> tuple[Status, str]:
        """Status and reason of the snippet. Enforces the limits of time and output."""
        deadline = time.monotonic() + timeout
        killed_for: Status | None = None
        while not is_cancelled():
            ready = self._wait(min(deadline - time.monotonic(), CANCEL_SECONDS))
            self._read_output(out, err)
            is_late, is_too_long = time.monotonic() >= deadline, out.total + err.total > OUTPUT_STOP_BYTES
            if is_late and killed_for:  # the killed process does not end
                raise SandboxError(self._zygote.end())
            if (is_late or is_too_long) and not killed_for:
                killed_for = Status.TIMEOUT if is_late else Status.OUTPUT
                deadline = time.monotonic() + KILL_TIMEOUT
                self._send_order(KILL)
            if self._control in ready:
                message = _receive_message(self._control)
                if message == b"":
                    self._selector.unregister(self._control)
                elif message and message[:1] == DONE and len(message) == 2 and self._is_session and not killed_for:
                    self._drain(out, err)
                    self._send_order(STOP)  # it may not compute before its next snippet, even if the report is false
                    return interpret_wait_status(message[1] << 8, None, timeout)
            if self._notice in ready:
                self._drain(out, err)
                notice = self._read_notice()
                self.close()
                if notice["stop_reason"] and not killed_for:
                    return Status.ERROR, notice["stop_reason"]
                return interpret_wait_status(notice["status"], killed_for, timeout)
        raise SandboxError("the run was cancelled")

    def _wait(self, seconds: float) -> list[Any]:
        """Wait until something can be read, and return from where."""
        return [key.fileobj for key, _ in self._selector.select(max(seconds, 0))]

    def _send_order(self, order: bytes) -> None:
        with contextlib.suppress(OSError):  # the process has ended already
            self._notice.send(order)

    def _read_notice(self) -> dict[str, Any]:
        """The zygote's notice that the process has ended. Raises SandboxError if the zygote has failed."""
        message = _receive_message(self._notice)
        if not message:
            raise SandboxError(self._zygote.end())
        notice: dict[str, Any] = json.loads(message)
        return notice

    def _read_output(self, out: OutputCapture, err: OutputCapture) -> bool:
        """Read one chunk of both streams. False if there is no more for now."""
        is_any = False
        for file, capture in ((self._out, out), (self._err, err)):
            data = file.read(_CHUNK)  # None: nothing for now
            if data:
                capture.feed(data)
                is_any = True
            elif data == b"" and file in self._selector.get_map():
                self._selector.unregister(file)
        return is_any

    def _drain(self, out: OutputCapture, err: OutputCapture) -> None:
        for _ in range(OUTPUT_STOP_BYTES // _CHUNK):
            if not self._read_output(out, err):
                break


def _receive_message(connection: socket.socket) -> bytes | None:
    """The next message; None if there is none for now, empty if the other end is closed."""
    try:
        try:
            return connection.recv(MESSAGE_BYTES)
        except ConnectionResetError:  # the other end was closed with unread messages; its own are still there
            return connection.recv(MESSAGE_BYTES)
    except BlockingIOError:
        return None


def make_memory_file(text: str) -> BinaryIO:
    """Sealed file in memory, opened at its beginning."""
    file = open(os.memfd_create("snippet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")  # noqa: SIM115
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def interpret_wait_status(status: int, killed_for: Status | None, timeout: float) -> tuple[Status, str]:
    """Status and reason of a process that ended with this wait status. `killed_for`: why it was killed here."""
    if killed_for is Status.TIMEOUT or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return Status.TIMEOUT, f"stopped after {timeout:g} s"
    if killed_for is Status.OUTPUT:
        return Status.OUTPUT, f"stopped after printing {OUTPUT_STOP_BYTES >> 20} MiB"
    if os.WIFEXITED(status):
        if (code := os.WEXITSTATUS(status)) == 0:
            return Status.OK, ""
        return (Status.MEMORY, "MemoryError") if code == EXIT_MEMORY else (Status.ERROR, f"exit code {code}")
    if (number := os.WTERMSIG(status)) == signal.SIGKILL:
        return Status.MEMORY, "killed by the kernel: no memory left on the machine"
    return Status.ERROR, f"killed by {format_signal(number)}"


def find_package_folders() -> list[str]:
    """Folders of the packages for snippets, and of the shared libraries installed with them."""
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = os.path.dirname(spec.origin)
            found += [path for path in (folder, f"{folder}.libs") if os.path.isdir(path)]
    return found


def _build_command(folder: str, bubblewrap: bool) -> list[str]:
    """`folder`: for the working folders of the runs; in bubblewrap a temporary file system replaces it."""
    packages = find_package_folders()
    sites = sorted({os.path.dirname(package) for package in packages})
    settings = {"sites": sites, "packages": packages, "folder": folder or "/tmp"}
    python = os.path.realpath(sys.executable)
    command = [python, "-B", "-S", "-s", "-P", "-c", _BOOT, json.dumps(settings), str(_ROOT)]
    return [*_build_bubblewrap_command(packages), *command] if bubblewrap else command


def _build_bubblewrap_command(packages: list[str]) -> list[str]:
    """Own process, network, user and IPC namespaces; a read-only root with the interpreter and the chosen packages."""
    user = ["--uid", str(NOBODY_UID), "--gid", str(NOBODY_UID)]
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", *user, "--new-session"]
    # Device file systems first: they would hide what is bound below them.
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(DISK_BYTES), "--tmpfs", "/tmp"]
    prefix = [os.path.realpath(sys.executable), os.path.dirname(os.__file__), f"{sys.base_prefix}/lib"]
    bound: list[str] = []
    for path in [*SHARED, "/etc/ld.so.cache", *prefix, *packages, *(str(_ROOT / name) for name in _SANDBOX_FILES)]:
        if os.path.islink(path) and path in SHARED:
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path) and not any(path.startswith(f"{other}/") or path == other for other in bound):
            command += ["--ro-bind", path, path]
            bound.append(path)
    return [*command, "--remount-ro", "/", "--chdir", "/", "--"]
