"""Requests, results and errors of the sandbox, and handles of its processes: the zygote, and a child of the zygote for
each snippet or session."""

from __future__ import annotations

import contextlib
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
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from alphaapollo.tools.sandbox.child import DONE, EXIT_MEMORY, MESSAGE_BYTES, READY, ChildSpec
from alphaapollo.tools.sandbox.linux import NOBODY_UID
from alphaapollo.tools.sandbox.zygote import CONTINUE, KILL, PACKAGES, SHARED, STOP, remove_tree

MAX_CODE_BYTES = 1 << 20
LAYERS = ("setuid", "rlimits", "landlock", "seccomp", "bubblewrap")
"""Isolation layers of a child, described in docs/tools.md."""
START_TIMEOUT = 120.0  # seconds until the zygote has imported everything
FORK_TIMEOUT = 30.0  # seconds until a child is ready
KILL_TIMEOUT = 10.0  # seconds until a killed child is gone
CANCEL_SECONDS = 0.2  # between two checks whether the caller has cancelled a run
SESSION_CPU_SECONDS = 3600
OUTPUT_STOP_BYTES = 16 << 20  # output at which a run is stopped
DISK_BYTES = 256 << 20  # size of the temporary file system that all runs share in bubblewrap
ENVIRONMENT = {  # replaces the inherited variables: one thread, and a reproducible order of sets
    **dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1"),
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "MALLOC_ARENA_MAX": "1",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
}
_MAX_MESSAGES = 64  # messages of a session process that are discarded before its next snippet
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BOOT = "import sys; sys.path.append(sys.argv[2]); from alphaapollo.tools.sandbox.zygote import main; main()"
_ROOT = Path(__file__).resolve().parents[3]
_SANDBOX_FILES = ["alphaapollo/__init__.py", "alphaapollo/tools/__init__.py", "alphaapollo/tools/sandbox"]


@dataclass(frozen=True)
class SandboxRequest:
    """Python snippet with its input and limits."""

    code: str
    stdin: str = ""  # in a session, all snippets share the stdin of the first one
    timeout: float = 10.0  # seconds of wall clock
    memory_mb: int = 1024  # MiB of address space in addition to that of the interpreter
    max_output: int = 1 << 16  # bytes kept per stream, half from the beginning and half from the end
    echo: bool = False  # print the value of the last expression, as the interactive interpreter does
    connection: socket.socket | None = None  # replaces stdout, in both directions; it is closed when the snippet starts
    session: str = ""  # snippets with the same non-empty name share variables until `end_session`


class SandboxStatus(StrEnum):
    """Outcome of a snippet, observed from outside its process."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # an exception, another exit code, a fatal signal
    TIMEOUT = "timeout"
    MEMORY = "memory"  # MemoryError, or killed by the OOM killer
    OUTPUT = "output"  # stopped because of too much output
    REFUSED = "refused"  # not run


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of a snippet, e.g. `SandboxResult(SandboxStatus.OK, "4\\n", "", 0.004, "prefork+rlimits+landlock")`.
    `stdout` contains only the output of the snippet, and does not prove how the snippet computed it."""

    status: SandboxStatus
    stdout: str  # truncated in the middle, with a note, above the output limit
    stderr: str
    seconds: float  # wall-clock time of the snippet
    mode: str  # the layers in use, e.g. "prefork+rlimits+landlock+seccomp+bubblewrap"
    reason: str = ""  # one line that explains a status other than ok
    restarted: bool = False  # the session's earlier variables were lost before this snippet


class SandboxError(RuntimeError):
    """Error for a failure of the sandbox itself. The outcome of the snippet is unknown and must not affect a reward."""


class SandboxUnavailableError(ValueError):
    """Error: this machine cannot isolate untrusted code, and the user has not allowed code without isolation."""


def format_sandbox_mode(layers: Collection[str]) -> str:
    """Return the name of a combination of isolation layers, e.g. `prefork+rlimits+seccomp`."""
    return "+".join(["prefork", *(name for name in LAYERS if name in layers)])


class ZygoteProcess:
    """Handle of the zygote, the interpreter that is forked for each snippet, optionally in bubblewrap. `available`:
    {isolation layer (landlock, seccomp, setuid): whether the machine supports it}. Raises SandboxError if the zygote
    does not start."""

    def __init__(self, bubblewrap: bool):
        self.folder = "" if bubblewrap else tempfile.mkdtemp(prefix="alphaapollo-sandbox-")
        if self.folder:
            os.chmod(self.folder, 0o711)  # the folder of each run belongs to the user of that run
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in end_and_describe_exit
        self._pidfd: int | None = None  # pidfd of the zygote, which keeps running if bubblewrap is killed
        self._lock = threading.RLock()  # no message is sent after end_and_describe_exit
        self._is_closed = False
        self._socket, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # the first message carries the zygote's pid
        with zygote_end:
            self.process = subprocess.Popen(
                _build_zygote_command(self.folder, bubblewrap),
                stdin=zygote_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,  # Ctrl-C reaches only the main program, which then closes the sandbox
            )
        self._socket.settimeout(START_TIMEOUT)
        message = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            message, control, _, _ = self._socket.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        if not message:
            raise SandboxError(self.end_and_describe_exit())
        self._socket.settimeout(None)
        (pid, _, _) = _CREDENTIALS.unpack(control[0][2])
        self._pidfd = os.pidfd_open(pid)
        self.available: dict[str, bool] = json.loads(message)

    @property
    def has_ended(self) -> bool:
        return self._is_closed or self.process.poll() is not None

    def fork(self, spec: ChildSpec, descriptors: list[int]) -> None:
        """Make the zygote fork a child. `descriptors`: the child's notice and control sockets and standard streams."""
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps(asdict(spec)).encode()], descriptors)
            except OSError as error:
                raise SandboxError(self.end_and_describe_exit()) from error

    def end_and_describe_exit(self) -> str:
        """Kill the zygote, remove its folder, and return an error message with the last line of its stderr."""
        with self._lock:
            if self._is_closed:
                return "the sandbox is closed"
            self._is_closed = True
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            if self._pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # the children of the zygote die with it
                os.close(self._pidfd)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._socket.close()
            self._log.close()
            if self.folder:
                with contextlib.suppress(FileNotFoundError):  # already removed by the zygote
                    remove_tree(self.folder)
            return f"the pre-forked interpreter failed{f': {lines[-1][:300]}' if lines else ''}"


class SnippetProcess:
    """Handle of a child of the zygote that runs one snippet, or the snippets of a session one after the other.

    The child receives the code through a control socket and a memory file. The result consists of the output in the
    child's pipes, its messages on the control socket, and the zygote's notice that the child ended. One thread may use
    this object at a time. Raises SandboxError if the child does not start."""

    def __init__(self, zygote: ZygoteProcess, layers: Collection[str], request: SandboxRequest):
        self._zygote = zygote
        self._mode = format_sandbox_mode(layers)
        self._is_session = bool(request.session)
        self._selector = selectors.PollSelector()
        self._notice, zygotes_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, childs_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._out, self._err = make_memory_file(), make_memory_file()
        for connection in (self._notice, self._control):
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
        cpu_seconds = SESSION_CPU_SECONDS if self._is_session else math.ceil(request.timeout) + 1
        spec = ChildSpec(sorted(layers), request.memory_mb, cpu_seconds, self._is_session)
        stdin = make_memory_file(request.stdin)
        try:
            stdout = request.connection or contextlib.nullcontext(self._out)
            with zygotes_end, childs_end, stdin, stdout as output:
                zygote.fork(spec, [file.fileno() for file in (zygotes_end, childs_end, stdin, output, self._err)])
            self._wait_until_ready()  # after this process has closed the other ends, so that it detects a death
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        return self._notice.fileno() == -1 or self._notice in self._wait_readable(0)

    def close(self) -> None:
        """Close the connections, which makes the zygote kill the process. Idempotent."""
        for file in (self._notice, self._control, self._out, self._err):
            file.close()

    def run(self, request: SandboxRequest, is_cancelled: Callable[[], bool]) -> SandboxResult:
        """Run one snippet. In a session, the next snippet can run afterwards, unless a limit stopped this one."""
        try:
            start = time.monotonic()
            self._send_code(request)
            status, reason = self._wait_for_end(request.timeout, is_cancelled)
            seconds = time.monotonic() - start
            out, err = (read_output(file, request.max_output) for file in (self._out, self._err))
            if self._notice.fileno() == -1:  # the process has ended
                self.close()
        except BaseException:
            self.close()
            raise
        return SandboxResult(status, out, err, seconds, self._mode, reason)

    def _wait_until_ready(self) -> None:
        self._wait_readable(FORK_TIMEOUT)
        if _receive_message(self._control) != READY:
            self._selector.unregister(self._control)
            self._send_command(KILL)
            self._wait_readable(KILL_TIMEOUT)
            notice = self._read_exit_notice()
            text = notice["stop_reason"] or read_output(self._err, 1 << 16).strip()
            raise SandboxError(f"the sandbox could not isolate a process: {text or notice['status']}")

    def _send_code(self, request: SandboxRequest) -> None:
        if self._is_session:  # discard data that the process sent after its last snippet
            for _ in range(_MAX_MESSAGES):
                if not _receive_message(self._control):
                    break
            for file in (self._out, self._err):
                os.truncate(file.fileno(), 0)
                os.lseek(file.fileno(), 0, os.SEEK_SET)  # the process shares the offset
            self._send_command(CONTINUE)
        ignored_errors = (BrokenPipeError, BlockingIOError)  # the timeout ends such a run
        with make_memory_file(request.code) as code, contextlib.suppress(*ignored_errors):
            socket.send_fds(self._control, [json.dumps({"echo": request.echo}).encode()], [code.fileno()])

    def _wait_for_end(self, timeout: float, is_cancelled: Callable[[], bool]) -> tuple[SandboxStatus, str]:
        """Enforce the time and output limits until the snippet ends. Return its status and the reason."""
        deadline = time.monotonic() + timeout
        killed_for: SandboxStatus | None = None
        while not is_cancelled():
            ready = self._wait_readable(min(deadline - time.monotonic(), CANCEL_SECONDS))
            size = sum(os.fstat(file.fileno()).st_size for file in (self._out, self._err))
            is_late, has_too_much_output = time.monotonic() >= deadline, size > OUTPUT_STOP_BYTES
            if is_late and killed_for:  # the killed process does not end
                raise SandboxError(self._zygote.end_and_describe_exit())
            if (is_late or has_too_much_output) and not killed_for:
                killed_for = SandboxStatus.TIMEOUT if is_late else SandboxStatus.OUTPUT
                deadline = time.monotonic() + KILL_TIMEOUT
                self._send_command(KILL)
            if self._control in ready:
                message = _receive_message(self._control)
                if message == b"":
                    self._selector.unregister(self._control)
                elif message and message[:1] == DONE and len(message) == 2 and self._is_session and not killed_for:
                    self._send_command(STOP)  # pause the process until its next snippet, even if the message is fake
                    return interpret_wait_status(message[1] << 8, None, timeout)  # an exit code as a wait status
            if self._notice in ready:
                notice = self._read_exit_notice()
                self._notice.close()
                if notice["stop_reason"] and not killed_for:
                    return SandboxStatus.ERROR, notice["stop_reason"]
                return interpret_wait_status(notice["status"], killed_for, timeout)
        raise SandboxError("the run of the snippet was cancelled")

    def _wait_readable(self, seconds: float) -> list[object]:
        """Wait until a connection is readable, at most this time. Return the readable connections."""
        return [key.fileobj for key, _ in self._selector.select(max(seconds, 0))]

    def _send_command(self, command: bytes) -> None:
        """Make the zygote STOP, CONTINUE or KILL the process."""
        with contextlib.suppress(OSError):  # the process has already ended
            self._notice.send(command)

    def _read_exit_notice(self) -> dict[str, Any]:
        """Return {status: wait status, stop_reason}, which the zygote sends when the process has ended."""
        message = _receive_message(self._notice)
        if not message:
            raise SandboxError(self._zygote.end_and_describe_exit())
        return json.loads(message)


def _receive_message(connection: socket.socket) -> bytes | None:
    """Return the next message, None if there is none yet, or b"" if the other end is closed."""
    try:
        try:
            return connection.recv(MESSAGE_BYTES)
        except ConnectionResetError:  # the other end closed with unread messages; its messages remain readable
            return connection.recv(MESSAGE_BYTES)
    except BlockingIOError:
        return None


def make_memory_file(text: str = "") -> BinaryIO:
    """Create a file in memory that contains this text."""
    file = open(os.memfd_create("snippet"), "w+b")  # noqa: SIM115
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


def read_output(file: BinaryIO, limit: int) -> str:
    """Return the text in a file, half from the beginning and half from the end if it has more than `limit` bytes."""
    size, head, tail = os.fstat(file.fileno()).st_size, (limit + 1) // 2, limit // 2
    if size <= limit:
        return os.pread(file.fileno(), size, 0).decode("utf-8", "replace")
    note = f"\n... [{size - limit} bytes cut] ...\n".encode()
    data = os.pread(file.fileno(), head, 0) + note + os.pread(file.fileno(), tail, size - tail)
    return data.decode("utf-8", "replace")


def interpret_wait_status(status: int, killed_for: SandboxStatus | None, timeout: float) -> tuple[SandboxStatus, str]:
    """Convert the wait status of a process (os.waitpid) to the status of its snippet and a reason. `killed_for`:
    TIMEOUT or OUTPUT if the snippet was killed at that limit."""
    if killed_for is SandboxStatus.TIMEOUT or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return SandboxStatus.TIMEOUT, f"stopped after {timeout:g} s"
    if killed_for is SandboxStatus.OUTPUT:
        return SandboxStatus.OUTPUT, f"stopped after printing {OUTPUT_STOP_BYTES >> 20} MiB"
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        results = {0: (SandboxStatus.OK, ""), EXIT_MEMORY: (SandboxStatus.MEMORY, "MemoryError")}
        return results.get(code, (SandboxStatus.ERROR, f"exit code {code}"))
    if (number := os.WTERMSIG(status)) == signal.SIGKILL:
        return SandboxStatus.MEMORY, "killed by the kernel: no memory left on the machine"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"  # a real-time signal
    return SandboxStatus.ERROR, f"killed by {name}"


def find_package_folders() -> list[str]:
    """Return the folders of the packages that snippets can import, and of the shared libraries of these packages."""
    folders = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = os.path.dirname(spec.origin)
            folders += [path for path in (folder, f"{folder}.libs") if os.path.isdir(path)]
    return folders


def _build_zygote_command(folder: str, bubblewrap: bool) -> list[str]:
    """Build the command that starts the zygote, which creates snippets' folders in `folder` (if empty, in /tmp)."""
    packages = find_package_folders()
    sites = sorted({os.path.dirname(package) for package in packages})
    settings = {"sites": sites, "packages": packages, "folder": folder or "/tmp"}
    python = os.path.realpath(sys.executable)
    command = [python, "-B", "-S", "-s", "-P", "-c", _BOOT, json.dumps(settings), str(_ROOT)]
    return [*_build_bubblewrap_command(packages), *command] if bubblewrap else command


def _build_bubblewrap_command(packages: list[str]) -> list[str]:
    """Build the bubblewrap prefix of a command: new namespaces, and a read-only root with Python and `packages`."""
    user = ["--uid", str(NOBODY_UID), "--gid", str(NOBODY_UID)]
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", *user, "--new-session"]
    # Mount the device file systems first, because they hide earlier mounts below them.
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
