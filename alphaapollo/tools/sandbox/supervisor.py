"""Drives one pre-forked interpreter from a thread of ours: hands it snippets, reads what they print, has those killed
whose time is up (by zygote.py), and says how they ended.

    submit -> waiting -> (at most `max_concurrent`) -> a child's control socket, stdin, stdout, stderr -> SandboxResult
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from alphaapollo.tools.sandbox.capture import Capture
from alphaapollo.tools.sandbox.child import DONE, MESSAGE_BYTES, READY, Launch
from alphaapollo.tools.sandbox.execute import EXIT_MEMORY
from alphaapollo.tools.sandbox.interpreter import Interpreter
from alphaapollo.tools.sandbox.order import Order
from alphaapollo.tools.sandbox.result import SandboxError, SandboxResult, Status, signal_name

FORK_TIMEOUT = 30.0  # seconds until a child is ready
KILL_TIMEOUT = 10.0  # until a killed child is gone
SESSION_CPU_SECONDS = 3600
OUTPUT_STOP_BYTES = 16 << 20  # printed by one run, after which it is stopped
_CHUNK = 1 << 16
_MESSAGES = 64  # of a child, heard at a time


@dataclass(frozen=True)
class Layers:
    """Which of them hold a child; bubblewrap holds the whole interpreter."""

    setuid: bool
    landlock: bool
    seccomp: bool
    bubblewrap: bool

    @property
    def mode(self) -> str:
        names = {"setuid": self.setuid, "rlimits": True, "landlock": self.landlock, "seccomp": self.seccomp}
        names["bubblewrap"] = self.bubblewrap
        return "+".join(["prefork", *(name for name, used in names.items() if used)])


@dataclass(eq=False)
class _Run:
    order: Order
    future: Future[SandboxResult]
    out: Capture
    err: Capture
    start: float = 0.0
    deadline: float = 0.0
    stopped: Status | None = None  # why we killed it
    restarted: bool = False


@dataclass(eq=False)
class _Child:
    id: int
    session: str
    control: socket.socket
    out: int
    err: int
    run: _Run | None = None
    ready: bool = False
    idle: bool = False  # the zygote has been told so


class Supervisor:
    """Starts an interpreter (SandboxError: it does not start) and serves it until `close` or its death.

    `layers` may be changed while nothing runs.
    """

    def __init__(self, bubblewrap: bool, max_concurrent: int):
        self.layers = Layers(False, False, False, bubblewrap)
        self._max_concurrent = max_concurrent
        self._children: dict[int, _Child] = {}
        self._sessions: dict[str, _Child] = {}
        self._lost: set[str] = set()  # sessions whose process ended
        self._waiting: deque[_Run] = deque()
        self._num_spawned = 0
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self.death = ""  # why it can serve no more
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._obey)
        started: Future[Interpreter] = Future()
        self._thread = threading.Thread(target=self._main, args=(started,), name="sandbox", daemon=True)
        self._thread.start()
        self.interpreter = started.result()

    # From any thread

    def submit(self, order: Order) -> Future[SandboxResult]:
        run = _Run(order, Future(), Capture(order.max_output), Capture(order.max_output))
        if not self._command(lambda: self._waiting.append(run)):
            run.future.set_exception(SandboxError(self.death))
        return run.future

    def end_session(self, session: str) -> None:
        """Kill its process, if there is one."""
        self._command(lambda: self._end_session(session))

    def close(self) -> None:
        """Kill everything; what has no result yet fails."""
        self._closing = True
        self._command(lambda: None)
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self.death:
                return False
            self._commands.append(command)
            with contextlib.suppress(BlockingIOError):  # full: it is awake already
                os.write(self._wake_write, b"!")
        return True

    # In the thread

    def _main(self, started: Future[Interpreter]) -> None:
        try:
            interpreter = Interpreter(self.layers.bubblewrap)
        except (OSError, SandboxError) as error:
            self._end(str(error))
            started.set_exception(error)
            return
        self._zygote = interpreter.socket
        self._selector.register(self._zygote, selectors.EVENT_READ, self._notice)
        started.set_result(interpreter)
        reason = "the sandbox failed"
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._seconds_to_deadline()):
                    if self._selector.get_map().get(key.fd) is key:  # not closed by what came before it in this list
                        key.data()
                self._stop_late()
                self._begin_waiting()
            reason = "the sandbox is closed"
        except (OSError, SandboxError) as error:
            reason = f"the sandbox failed: {error}{interpreter.last_words()}"
        finally:
            interpreter.end()
            self._end(reason)

    def _end(self, reason: str) -> None:
        with self._lock:
            self.death = reason
            os.close(self._wake_write)
        self._obey()
        os.close(self._wake_read)
        runs = [*self._waiting, *(child.run for child in self._children.values() if child.run)]
        for child in self._children.values():
            self._release(child)
        self._selector.close()
        for run in runs:
            if not run.future.done():
                run.future.set_exception(SandboxError(reason))

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, _CHUNK)
        while self._commands:
            self._commands.popleft()()

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [child.run.deadline for child in self._children.values() if child.run]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _stop_late(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.run and now >= child.run.deadline:
                if child.run.stopped:
                    raise SandboxError("a killed process does not end")
                self._stop(child, child.run, Status.TIMEOUT)

    def _stop(self, child: _Child, run: _Run, why: Status) -> None:
        run.stopped, run.deadline = why, time.monotonic() + KILL_TIMEOUT
        self._order(child, "kill")

    def _order(self, child: _Child, what: str) -> None:
        """kill; idle or busy: between two snippets of a session, or not."""
        child.idle = what == "idle"
        self._zygote.send(json.dumps({what: child.id}).encode())

    def _begin_waiting(self) -> None:
        active = sum(child.run is not None for child in self._children.values())
        held: list[_Run] = []
        while self._waiting and active < self._max_concurrent:
            run = self._waiting.popleft()
            child = self._sessions.get(run.order.session)
            if child and child.run:
                held.append(run)
            elif run.future.set_running_or_notify_cancel():
                with _answered(run):
                    self._begin(run, child or self._spawn(run.order))
                active += 1
        self._waiting.extendleft(reversed(held))

    def _begin(self, run: _Run, child: _Child) -> None:
        run.restarted = run.order.session in self._lost
        self._lost.discard(run.order.session)
        run.start = time.monotonic()
        run.deadline = run.start + (run.order.timeout if child.ready else FORK_TIMEOUT)
        child.run = run
        if child.idle:
            self._order(child, "busy")
        code = memory_file(run.order.code.encode("utf-8", "surrogatepass"))
        with (
            code,
            contextlib.suppress(BrokenPipeError, BlockingIOError),
        ):  # it is gone, or takes none: its time will be up
            socket.send_fds(child.control, [json.dumps({"echo": run.order.echo}).encode()], [code.fileno()])

    def _spawn(self, order: Order) -> _Child:
        self._num_spawned += 1
        cpu = SESSION_CPU_SECONDS if order.session else math.ceil(order.timeout) + 1
        layers = self.layers
        request = Launch(
            self._num_spawned, layers.setuid, layers.landlock, layers.seccomp, order.memory_mb, cpu, bool(order.session)
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        with (
            theirs,
            open(out_write, "wb"),
            open(err_write, "wb"),
            memory_file(order.stdin.encode("utf-8", "surrogatepass")) as stdin,
        ):
            descriptors = [theirs.fileno(), stdin.fileno(), out_write, err_write]
            socket.send_fds(self._zygote, [json.dumps(asdict(request)).encode()], descriptors)
        child = _Child(request.id, order.session, ours, out, err)
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._hear(child))
        for descriptor in (out, err):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, lambda fd=descriptor: self._read(child, fd))
        self._children[child.id] = child
        if order.session:
            self._sessions[order.session] = child
        return child

    def _hear(self, child: _Child) -> None:
        """What a child says itself: that it is ready, that a session's snippet is done."""
        for _ in range(_MESSAGES):
            try:
                message = child.control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                message = b""
            if not message:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(child.control)
                return
            run = child.run
            if message == READY and not child.ready and run:
                child.ready, run.start = True, time.monotonic()
                run.deadline = run.start + run.order.timeout
            elif message[:1] == DONE and len(message) == 2 and child.session and run and not run.stopped:
                self._drain(child)
                child.run = None
                self._order(child, "idle")  # if it lies, it is killed for computing on
                self._answer(run, *exit_status(message[1]), time.monotonic() - run.start)

    def _read(self, child: _Child, descriptor: int) -> bool:
        """One piece of output; false when there is no more for now."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
            return False
        if (run := child.run) is not None:  # else a thread that a session's snippet left behind
            (run.out if descriptor == child.out else run.err).feed(data)
            if run.out.total + run.err.total > OUTPUT_STOP_BYTES and not run.stopped:
                self._stop(child, run, Status.OUTPUT)
        return True

    def _drain(self, child: _Child) -> None:
        for descriptor in (child.out, child.err):
            for _ in range(OUTPUT_STOP_BYTES // _CHUNK):
                if not self._read(child, descriptor):
                    break

    def _notice(self) -> None:
        """The zygote says that a child has ended."""
        message = self._zygote.recv(MESSAGE_BYTES)
        if not message:
            raise SandboxError("the pre-forked interpreter died")
        notice = json.loads(message)
        child = self._children.pop(notice["exit"])
        with _answered(child.run):
            self._settle(child, notice)

    def _settle(self, child: _Child, notice: dict[str, Any]) -> None:
        """The last words of a child, and what comes of its run."""
        self._hear(child)
        self._drain(child)
        self._release(child)
        if child.session and self._sessions.get(child.session) is child:
            del self._sessions[child.session]
            self._lost.add(child.session)
        if (run := child.run) is None:
            return
        if not child.ready:
            text = notice["stopped"] or run.err.text().strip() or f"wait status {notice['status']}"
            run.future.set_exception(SandboxError(f"a process could not be locked up: {text}"))
            return
        status, reason = wait_status(notice["status"], run.stopped, run.order.timeout)
        if notice["stopped"] and not run.stopped:
            status, reason = Status.ERROR, notice["stopped"]
        self._answer(run, status, reason, notice["seconds"])

    def _release(self, child: _Child) -> None:
        for file in (child.control, child.out, child.err):
            with contextlib.suppress(KeyError):
                self._selector.unregister(file)
        child.control.close()
        os.close(child.out)
        os.close(child.err)

    def _end_session(self, session: str) -> None:
        self._lost.discard(session)
        child = self._sessions.pop(session, None)
        if child is None:
            return
        if child.run:
            child.run.future.set_exception(SandboxError("the session was closed"))
            child.run = None
        self._order(child, "kill")

    def _answer(self, run: _Run, status: Status, reason: str, seconds: float) -> None:
        out, err = run.out.text(), run.err.text()
        run.future.set_result(SandboxResult(status, out, err, seconds, self.layers.mode, reason, run.restarted))


@contextlib.contextmanager
def _answered(run: _Run | None) -> Iterator[None]:
    """Should this block fail, which ends the thread, so does the run: nobody else knows of it at that moment."""
    try:
        yield
    except Exception as error:
        if run is not None and not run.future.done():
            run.future.set_exception(SandboxError(f"the sandbox failed: {type(error).__name__}: {error}"))
        raise


def memory_file(data: bytes) -> BinaryIO:
    """An open file at its beginning, in memory, that nobody can change."""
    file = open(os.memfd_create("snippet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")  # noqa: SIM115
    file.write(data)
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def exit_status(code: int) -> tuple[Status, str]:
    """What an exit code means, and in words."""
    if code == 0:
        return Status.OK, ""
    return (Status.MEMORY, "MemoryError") if code == EXIT_MEMORY else (Status.ERROR, f"exit code {code}")


def wait_status(status: int, stopped: Status | None, timeout: float) -> tuple[Status, str]:
    """What the kernel says of how a process ended. `stopped`: why we killed it, if we did."""
    if stopped is Status.TIMEOUT or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return Status.TIMEOUT, f"stopped after {timeout:g} s"
    if stopped is Status.OUTPUT:
        return Status.OUTPUT, f"stopped after printing {OUTPUT_STOP_BYTES >> 20} MiB"
    if os.WIFEXITED(status):
        return exit_status(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL:
        return Status.MEMORY, "killed by the kernel: no memory left on the machine"
    return Status.ERROR, f"killed by {signal_name(number)}"
