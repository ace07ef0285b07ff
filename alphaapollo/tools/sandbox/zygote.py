"""Zygote: interpreter that imports the libraries of snippets once, and forks one child per snippet or session.

    program --(socket on descriptor 0: ChildSpec with descriptors of the child)--> zygote --fork--> child
    program --(notice connection of a child: stop, continue, kill)--> zygote --(notice that the child ended)--> program

Code, input and output go directly between program and child, so the zygote's memory, which every child inherits, never
contains them. The zygote limits the numbers of threads and files of a child, because the kernel has no such limits.
When the program ends, the zygote kills all children and exits.

In bubblewrap only this package of the project exists, so it must not import other packages of the project."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass

from alphaapollo.tools.sandbox import linux
from alphaapollo.tools.sandbox.child import MESSAGE_BYTES, ChildSpec, ForkContext, run_child

PACKAGES = ["numpy", "scipy", "sympy", "mpmath"]  # packages that snippets can import, if they are installed

_STANDARD = """
abc argparse array ast asyncio base64 binascii bisect builtins calendar cmath codecs collections collections.abc
concurrent.futures contextlib copy csv dataclasses datetime decimal difflib doctest enum errno fractions functools
gettext glob hashlib heapq hmac html html.parser inspect io itertools json keyword linecache locale logging math
numbers operator os.path pathlib pickle platform pprint queue random re reprlib secrets shlex shutil signal socket
sqlite3 ssl stat statistics string struct subprocess sys tempfile textwrap threading time timeit token tokenize
traceback types typing unicodedata unittest unittest.mock urllib.parse uuid warnings weakref xml.etree.ElementTree
zlib zoneinfo"""
_SCIENTIFIC = """
numpy numpy.fft numpy.linalg numpy.polynomial numpy.random scipy scipy.constants scipy.integrate scipy.interpolate
scipy.linalg scipy.optimize scipy.signal scipy.sparse scipy.sparse.linalg scipy.spatial scipy.special scipy.stats
mpmath sympy sympy.abc sympy.combinatorics sympy.geometry sympy.logic sympy.ntheory sympy.parsing.sympy_parser
sympy.stats sympy.vector"""
MODULES = f"{_STANDARD} {_SCIENTIFIC}".split()
CHECK_SECONDS = 0.2  # interval of the checks of threads and files
MAX_THREADS = 256  # per child
MAX_FILES = 10_000  # in the folder of a child
SUSPENDED_BYTES = (os.cpu_count() or 1) << 30  # memory of all suspended sessions
KILLED_SUSPENDED = "stopped while suspended: the sessions needed too much memory"
STOP, CONTINUE, KILL = b"S", b"C", b"K"  # commands from the program
SIGNALS = {STOP: signal.SIGSTOP, CONTINUE: signal.SIGCONT}
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom"]
SHARED = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]  # shared libraries, time zones


def trigger_lazy_imports() -> None:
    """Trigger lazy imports of numpy and sympy now: without Landlock, the seccomp filter lets snippets open no files."""
    if "sympy" in sys.modules:
        import sympy

        x = sympy.Symbol("x")
        sympy.integrate(sympy.exp(-x) * sympy.sin(x), x)
        sympy.simplify((x**2 - 1) / (x - 1) + sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
        sympy.solve(x**2 - 2, x)
        sympy.factorint(360)
        sympy.parsing.sympy_parser.parse_expr("2*x + sqrt(2)").evalf()
        sympy.Matrix([[1, 2], [3, 4]]).eigenvals()
        sympy.Sum(x, (x, 1, 10)).doit()
        sympy.limit(sympy.sin(x) / x, x, 0)
    if "numpy" in sys.modules:
        import numpy

        numpy.linalg.solve(numpy.eye(2), numpy.ones(2))
        numpy.linalg.eigvals(numpy.eye(2))


@dataclass
class _ChildProcess:
    folder: str
    notice_socket: int  # connection that receives commands and, at the end, sends the notice
    stop_reason: str = ""  # why the zygote killed the child
    suspended_at: float = 0.0  # time.monotonic() of the suspension; 0: the child runs


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path += settings["sites"]
    program = socket.socket(fileno=os.dup(0))
    soft = min(1 << 14, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # keeps the output of killed snippets
    for name in MODULES:
        with contextlib.suppress(ImportError):  # some Python builds lack some modules
            importlib.import_module(name)
    trigger_lazy_imports()
    # Hide packages that are not loaded yet. Loaded packages still find their own modules.
    hidden = {*settings["sites"], sys.argv[2]}
    sys.path = [path for path in sys.path if path not in hidden]
    for name in [name for name in sys.modules if name.startswith("alphaapollo")]:
        del sys.modules[name]
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the OOM killer takes this process first
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    library, version = os.path.dirname(os.__file__), linux.get_landlock_version()
    allowed = dict.fromkeys([library, *settings["packages"], *SHARED], linux.READ)
    allowed |= dict.fromkeys(DEVICES, linux.DEVICE)
    rules = [(os.open(path, os.O_PATH), rights) for path, rights in allowed.items() if os.path.exists(path)]
    context = ForkContext(os.getpid(), linux.count_address_space_bytes(), library, version, rules)
    available = {"landlock": version > 0, "seccomp": linux.is_seccomp_supported(), "setuid": os.geteuid() == 0}
    gc.collect()
    gc.freeze()
    program.send(json.dumps(available).encode())
    Zygote(program, context, settings["folder"]).serve()


class Zygote:
    """Message loop of the zygote: forks children on request, executes commands for them, and reports when they end."""

    def __init__(self, program_socket: socket.socket, context: ForkContext, folder: str):
        self._program, self._context, self._folder = program_socket, context, folder
        self._children: dict[int, _ChildProcess] = {}  # pid -> child
        self._poller = select.poll()
        self._wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        for descriptor in (self._program.fileno(), self._wake):
            self._poller.register(descriptor, select.POLLIN)
        next_check = 0.0
        while True:
            for descriptor, _ in self._poller.poll(CHECK_SECONDS * 1000 if self._children else None):
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                    self._reap_children()
                elif descriptor != self._program.fileno():
                    self._signal_child(descriptor)
                elif not self.fork_next_child():
                    self._kill_children()
                    return
            if (now := time.monotonic()) >= next_check:
                self._enforce_limits()
                next_check = now + CHECK_SECONDS

    def _enforce_limits(self) -> None:
        """Kill children with more than MAX_THREADS threads or MAX_FILES files. If the suspended sessions have more than
        SUSPENDED_BYTES, kill those that were suspended first."""
        suspended = [(child.suspended_at, pid) for pid, child in self._children.items() if child.suspended_at]
        size = 0
        for _, pid in sorted(suspended, reverse=True):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
                _, resident, shared, *_ = map(int, file.read().split())
                size += (resident - shared) * resource.getpagesize()
            if size > SUSPENDED_BYTES:
                self._children[pid].stop_reason = KILLED_SUSPENDED
        for pid, child in self._children.items():
            with contextlib.suppress(OSError):  # if /proc is mounted with hidepid
                if len(os.listdir(f"/proc/{pid}/task")) > MAX_THREADS:
                    child.stop_reason = f"stopped at more than {MAX_THREADS} threads"
            if not child.stop_reason and has_more_files(child.folder, MAX_FILES):
                child.stop_reason = f"stopped at more than {MAX_FILES} files, or a folder that cannot be read"
            if child.stop_reason:
                _kill_child(pid)

    def _kill_children(self) -> None:
        """Kill all children. Then remove the folder of the sandbox."""
        for pid in self._children:
            _kill_child(pid)
            os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the program may have removed the folder
            remove_tree(self._folder)

    def _signal_child(self, notice_socket: int) -> None:
        """Stop, continue or kill a child as its notice connection says. If the connection is closed, kill the child."""
        for pid, child in self._children.items():
            if child.notice_socket != notice_socket:
                continue
            with contextlib.suppress(BlockingIOError):  # the event belongs to an earlier child with the same descriptor
                command = os.read(notice_socket, MESSAGE_BYTES)
                if command in SIGNALS:
                    os.kill(pid, SIGNALS[command])
                    child.suspended_at = time.monotonic() if command == STOP else 0.0
                else:
                    _kill_child(pid)
                if not command:
                    self._poller.unregister(notice_socket)

    def fork_next_child(self) -> bool:
        """Fork the child that the program's next message requests. Returns False if the program has ended."""
        text, received, _, _ = socket.recv_fds(self._program, MESSAGE_BYTES, 5)
        if not text:
            return False
        notice_socket, *descriptors = received
        os.set_blocking(notice_socket, False)
        try:
            self._fork_child(ChildSpec(**json.loads(text)), notice_socket, descriptors)
        except OSError as error:  # no free process or disk space: fail only this run
            _send_end_notice(notice_socket, 0, str(error))
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _fork_child(self, spec: ChildSpec, notice_socket: int, descriptors: list[int]) -> None:
        folder = os.path.join(self._folder, secrets.token_hex(16))  # other snippets cannot guess it
        os.mkdir(folder, 0o700)
        try:
            if "setuid" in spec.layers:
                os.chown(folder, linux.NOBODY_UID, linux.NOBODY_UID)
            pid = os.fork()
        except OSError:
            os.rmdir(folder)
            raise
        if pid == 0:
            run_child(spec, self._context, folder, descriptors)  # does not return
        self._children[pid] = _ChildProcess(folder, notice_socket)
        self._poller.register(notice_socket, select.POLLIN)

    def _reap_children(self) -> None:
        """Remove the folders of ended children, and send each child's exit status through its notice connection."""
        while self._children:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            _kill_child(ended.si_pid)  # and the processes that it may have started without seccomp
            pid, status = os.waitpid(ended.si_pid, 0)
            child = self._children.pop(pid)
            with contextlib.suppress(OSError):  # the folder is removed when the zygote ends
                remove_tree(child.folder)
            with contextlib.suppress(KeyError):  # already unregistered because the program closed it
                self._poller.unregister(child.notice_socket)
            _send_end_notice(child.notice_socket, status, child.stop_reason)


def has_more_files(folder: str, limit: int) -> bool:
    """Return whether a folder contains more than `limit` files and folders, at any depth, or a folder that cannot be
    read. Stops when the answer is known."""
    waiting, count = [folder], 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > limit:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):  # removed or replaced meanwhile
            continue
        except OSError:  # no permission, or a path longer than PATH_MAX
            return True
    return False


def remove_tree(folder: str) -> None:
    """Delete a folder with its contents. Works for any depth, because contents of subfolders are first moved up."""
    moved = 0
    prefix = secrets.token_hex(8)
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                moved += 1
                os.rename(inner.path, os.path.join(folder, f"{prefix}-{moved}"))
            os.rmdir(entry.path)
    os.rmdir(folder)


def _send_end_notice(notice_socket: int, wait_status: int, stop_reason: str) -> None:
    """Send an ended child's wait status and stop reason through its notice connection, and close the connection."""
    with contextlib.suppress(BrokenPipeError):
        os.write(notice_socket, json.dumps({"status": wait_status, "stop_reason": stop_reason}).encode())
    os.close(notice_socket)


def _kill_child(pid: int) -> None:
    """Kill a child that is not reaped yet, so that its pid is not reused, and its process group."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
