"""Pre-forked interpreter that has imported what snippets need and forks one child per run.

    supervisor --(socket on descriptor 0: ChildSpec with the child's descriptors | kill | idle | busy)--> zygote
    supervisor <--(ready | exit of a child)-- zygote --fork--> child

Code, input and output go directly between supervisor and child, so the memory of the zygote, which every child
inherits, contains none of them. The zygote enforces two limits that the kernel does not have: the number of threads of
a child, and no computation between two snippets of a session. When the supervisor disappears, it kills all children and
exits.

In bubblewrap this package is the only part of the project that exists: it must not import others.
"""

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

from alphaapollo.tools.sandbox import landlock, linux, seccomp
from alphaapollo.tools.sandbox.child import MESSAGE_BYTES, NOBODY_UID, ChildSpec, ForkContext, run_child
from alphaapollo.tools.sandbox.preload import MODULES, warm_up

CHECK_SECONDS = 0.2  # between two checks of the children
MAX_THREADS = 256  # of a child
IDLE_CPU_SECONDS = 1.0  # CPU time that a session may use between two snippets
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom"]
SHARED = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]  # shared libraries, time zones


@dataclass
class _ChildProcess:
    id: int
    folder: str
    start: float
    may_fork: bool  # no seccomp filter forbids it
    idle_cpu: float | None = None  # between two snippets of a session: the CPU time used until then
    stop_reason: str = ""  # why the zygote killed it


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path += settings["sites"]
    supervisor = socket.socket(fileno=os.dup(0))
    soft = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # keeps what a killed snippet printed
    for name in MODULES:
        with contextlib.suppress(ImportError):  # not every Python has all of them
            importlib.import_module(name)
    warm_up()
    # Hide everything that is not loaded yet; packages that are loaded find their own modules.
    hidden = {*settings["sites"], sys.argv[2]}
    sys.path = [path for path in sys.path if path not in hidden]
    for name in [name for name in sys.modules if name.startswith("alphaapollo")]:
        del sys.modules[name]
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the OOM killer takes this process first
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    zygote = Zygote(supervisor, _make_context(settings["packages"]), settings["folder"])
    facts = {
        "landlock": zygote.context.landlock_version > 0,
        "seccomp": seccomp.supported(),
        "setuid": os.geteuid() == 0,
    }
    gc.collect()
    gc.freeze()
    supervisor.send(json.dumps(facts).encode())
    zygote.serve()


def _make_context(packages: list[str]) -> ForkContext:
    library = os.path.dirname(os.__file__)
    rules = []
    for path in [library, *packages, *SHARED, *DEVICES]:
        if os.path.exists(path):
            rights = landlock.DEVICE if path in DEVICES else landlock.READ
            rules.append((os.open(path, os.O_PATH), rights))
    return ForkContext(os.getpid(), linux.address_space(), library, landlock.version(), rules)


class Zygote:
    """Message loop that serves one supervisor."""

    def __init__(self, supervisor: socket.socket, context: ForkContext, folder: str):
        self.context = context
        self._supervisor = supervisor
        self._folder = folder
        self._children: dict[int, _ChildProcess] = {}  # by pid
        self._cleaners: set[int] = set()  # pids of processes that remove folders
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        poller = select.poll()
        for descriptor in (self._supervisor.fileno(), self._wake):
            poller.register(descriptor, select.POLLIN)
        next_check = 0.0
        while True:
            for descriptor, _ in poller.poll(CHECK_SECONDS * 1000 if self._children else None):
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif not self._handle_message():
                    self._end()
                    return
            if (now := time.monotonic()) >= next_check:
                self._check_usage()
                next_check = now + CHECK_SECONDS

    def _check_usage(self) -> None:
        for pid, one in self._children.items():
            threads, cpu_seconds = usage(pid)
            if threads > MAX_THREADS:
                one.stop_reason = f"stopped at more than {MAX_THREADS} threads"
            elif one.idle_cpu is not None and cpu_seconds > one.idle_cpu + IDLE_CPU_SECONDS:
                one.stop_reason = "stopped because it kept computing after its snippet had ended"
            if one.stop_reason:
                _kill(pid)

    def _end(self) -> None:
        for pid in self._children:
            _kill(pid)
            os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the supervisor, if it is alive, removes it too
            remove_tree(self._folder)

    def _handle_message(self) -> bool:
        """Handle one message of the supervisor. False if the supervisor is gone."""
        text, descriptors, _, _ = socket.recv_fds(self._supervisor, MESSAGE_BYTES, 4)
        if not text:
            return False
        message = json.loads(text)
        if "layers" not in message:
            for pid, one in self._children.items():
                if one.id == message.get("kill"):
                    _kill(pid)
                elif one.id == message.get("idle"):
                    one.idle_cpu = usage(pid)[1]
                elif one.id == message.get("busy"):
                    one.idle_cpu = None
            return True
        spec = ChildSpec(**message)
        try:
            self._fork(spec, descriptors)
        except OSError as error:  # no free process or disk space: only this run fails
            self._notify({"exit": spec.id, "status": 0, "seconds": 0.0, "stop_reason": str(error)})
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _fork(self, spec: ChildSpec, descriptors: list[int]) -> None:
        folder = os.path.join(self._folder, f"run{spec.id}")
        start = time.monotonic()
        os.mkdir(folder, 0o700)
        try:
            if "setuid" in spec.layers:
                os.chown(folder, NOBODY_UID, NOBODY_UID)
            pid = os.fork()
        except OSError:
            os.rmdir(folder)
            raise
        if pid == 0:
            run_child(spec, self.context, folder, descriptors)
        self._children[pid] = _ChildProcess(spec.id, folder, start, "seccomp" not in spec.layers)

    def _notify(self, notice: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.send(json.dumps(notice).encode())

    def _reap(self) -> None:
        while self._children or self._cleaners:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._cleaners:
                self._cleaners.remove(pid)
                continue
            one = self._children.pop(pid)
            if one.may_fork:
                _kill_group(pid)
            self._clean(one.folder)
            seconds = time.monotonic() - one.start
            self._notify({"exit": one.id, "status": status, "seconds": seconds, "stop_reason": one.stop_reason})

    def _clean(self, folder: str) -> None:
        """Remove a child's folder; one that is not empty may hold a lot, so a separate process removes it."""
        with contextlib.suppress(OSError):
            os.rmdir(folder)
            return
        with contextlib.suppress(OSError):  # no free process: the folder is removed when the zygote ends
            pid = os.fork()
            if pid == 0:
                try:
                    remove_tree(folder)
                finally:
                    os._exit(0)
            self._cleaners.add(pid)


def usage(pid: int) -> tuple[int, float]:
    """Threads and CPU seconds of a child; (0, 0.0) where /proc is mounted with hidepid."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may contain anything
    except OSError:
        return 0, 0.0
    return int(fields[17]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def remove_tree(folder: str) -> None:
    """Remove a folder of any depth: the contents of a subfolder are moved to the top first."""
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


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid cannot have been reused
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    """Kill the processes that a child started, where no seccomp filter forbade that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
