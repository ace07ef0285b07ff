"""The pre-forked interpreter: it has imported what snippets need, and forks one child for each. Started by launch.py.

    supervisor --(socket on descriptor 0: Launch + the child's descriptors | kill | idle | busy)--> zygote
    supervisor <--(ready | exit of a child)-- zygote --fork--> child

It never sees code, input or output: those go between supervisor and child. Its memory, which every child has a copy
of, holds nothing worth stealing. It watches what no limit of the kernel holds in every mode: how many threads a child
has, and that a session's process does not compute between two snippets. When the supervisor goes away it kills what
runs and ends.
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

from alphaapollo.pulse import TICKS, stat
from alphaapollo.tools.sandbox import child, landlock, rlimits, seccomp
from alphaapollo.tools.sandbox.linux import PR_SET_DUMPABLE, machine, prctl
from alphaapollo.tools.sandbox.preload import MODULES, warm_up

LOOK_SECONDS = 0.2  # between two looks at the children
MAX_THREADS = 256  # of a child
IDLE_CPU_SECONDS = 1.0  # of processor time that a session's process may use between two snippets
DEVICES = ["/dev/null", "/dev/zero", "/dev/urandom"]
SHARED = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]  # shared libraries, time zones


@dataclass
class _Child:
    id: int
    folder: str
    start: float
    alone: bool  # seccomp lets it start no processes
    idle_since: float | None = None  # of a session between two snippets: the processor time used until then
    stopped: str = ""  # why it was killed from here


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path += settings["sites"]
    supervisor = socket.socket(fileno=os.dup(0))
    soft = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what a killed snippet printed is not lost
    _preload()
    # What is not loaded is not there; packages that are find their own modules.
    hidden = {*settings["sites"], sys.argv[2]}
    sys.path = [path for path in sys.path if path not in hidden]
    for name in [name for name in sys.modules if name.startswith("alphaapollo")]:
        del sys.modules[name]
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out on the machine, this goes first
    prctl(PR_SET_DUMPABLE, 0)
    zygote = Zygote(supervisor, _ground(settings["packages"]), settings["folder"])
    facts = {"landlock": zygote.ground.landlock_version, "seccomp": seccomp.supported(), "root": os.geteuid() == 0}
    if seccomp.supported():
        for files in (True, False):
            seccomp.packed(machine(), files)
    gc.collect()
    gc.freeze()
    supervisor.send(json.dumps(facts).encode())
    zygote.serve()


def _preload() -> None:
    for name in MODULES:
        with contextlib.suppress(ImportError):  # not every Python has all of them
            importlib.import_module(name)
    warm_up()


def _ground(packages: list[str]) -> child.Ground:
    library = os.path.dirname(os.__file__)
    rules = []
    for path in [library, *packages, *SHARED, *DEVICES]:
        if os.path.exists(path):
            rights = landlock.DEVICE if path in DEVICES else landlock.READ
            rules.append((os.open(path, os.O_PATH), rights))
    return child.Ground(landlock.version(), rules, library, rlimits.address_space(), os.getpid())


class Zygote:
    """Serves one supervisor."""

    def __init__(self, supervisor: socket.socket, ground: child.Ground, folder: str):
        self.ground = ground
        self._supervisor = supervisor
        self._folder = folder
        self._children: dict[int, _Child] = {}  # by pid
        self._cleaners: set[int] = set()
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        poller = select.poll()
        for descriptor in (self._supervisor.fileno(), self._wake):
            poller.register(descriptor, select.POLLIN)
        next_look = 0.0
        while True:
            for descriptor, _ in poller.poll(LOOK_SECONDS * 1000 if self._children else None):
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif not self._obey():
                    self._end()
                    return
            if (now := time.monotonic()) >= next_look:
                self._look()
                next_look = now + LOOK_SECONDS

    def _look(self) -> None:
        for pid, one in self._children.items():
            threads, used = usage(pid)
            if threads > MAX_THREADS:
                one.stopped = f"stopped at more than {MAX_THREADS} threads"
            elif one.idle_since is not None and used > one.idle_since + IDLE_CPU_SECONDS:
                one.stopped = "stopped: it went on computing when its snippet had ended"
            if one.stopped:
                _kill(pid)

    def _end(self) -> None:
        for pid in self._children:
            _kill(pid)
            os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the supervisor, if it lives, removes it too
            remove_tree(self._folder)

    def _obey(self) -> bool:
        """One message of the supervisor; false when it is gone."""
        message, descriptors, _, _ = socket.recv_fds(self._supervisor, child.MESSAGE_BYTES, 4)
        if not message:
            return False
        order = json.loads(message)
        if {"kill", "idle", "busy"} & order.keys():
            for pid, one in self._children.items():
                if one.id == order.get("kill"):
                    _kill(pid)
                elif one.id == order.get("idle"):
                    one.idle_since = usage(pid)[1]
                elif one.id == order.get("busy"):
                    one.idle_since = None
            return True
        launch = child.Launch(**order)
        try:
            self._fork(launch, descriptors)
        except OSError as error:  # no process or no room to be had: this run's failure alone
            self._notify({"exit": launch.id, "status": 0, "seconds": 0.0, "cpu": 0.0, "stopped": str(error)})
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _fork(self, launch: child.Launch, descriptors: list[int]) -> None:
        folder = os.path.join(self._folder, f"run{launch.id}")
        start = time.monotonic()
        os.mkdir(folder, 0o700)
        try:
            if launch.setuid:
                os.chown(folder, child.NOBODY, child.NOBODY)
            pid = os.fork()
        except OSError:
            os.rmdir(folder)
            raise
        if pid == 0:
            child.run(launch, self.ground, folder, descriptors)
        self._children[pid] = _Child(launch.id, folder, start, launch.seccomp)

    def _notify(self, notice: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.send(json.dumps(notice).encode())

    def _reap(self) -> None:
        while self._children or self._cleaners:
            pid, status, resources = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._cleaners:
                self._cleaners.remove(pid)
                continue
            one = self._children.pop(pid)
            if not one.alone:
                _kill_group(pid)
            self._clean(one.folder)
            seconds = time.monotonic() - one.start
            cpu = resources.ru_utime + resources.ru_stime
            self._notify({"exit": one.id, "status": status, "seconds": seconds, "cpu": cpu, "stopped": one.stopped})

    def _clean(self, folder: str) -> None:
        try:
            os.rmdir(folder)
        except OSError:  # something is in it: possibly a great deal
            try:
                pid = os.fork()
            except OSError:
                return  # no process to be had: it goes with everything else at the end
            if pid == 0:
                try:
                    remove_tree(folder)
                finally:
                    os._exit(0)
            self._cleaners.add(pid)


def usage(pid: int) -> tuple[int, float]:
    """Threads of a child, and seconds of processor time; (0, 0.0) where /proc is mounted with hidepid."""
    try:
        fields = stat(pid)
    except OSError:
        return 0, 0.0
    return int(fields[17]), (int(fields[11]) + int(fields[12])) / TICKS


def remove_tree(folder: str) -> None:
    """Remove a folder however deep it is: what lies in a subfolder is moved to the top first."""
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
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    """Whatever it started, where no seccomp filter forbade that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
