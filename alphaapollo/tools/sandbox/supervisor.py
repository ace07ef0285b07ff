"""Event loop in a thread that drives one zygote: starts children, enforces time and output limits, collects results.

A run waits for its session's lock and for one of `max_concurrent` slots. Then its child gets the code through a control
socket and a memory file, and the result comes from the child's pipes, the control socket and the zygote's exit notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

from alphaapollo.tools.sandbox.child import DONE, MESSAGE_BYTES, READY, ChildSpec
from alphaapollo.tools.sandbox.execute import EXIT_MEMORY
from alphaapollo.tools.sandbox.types import (
    OutputCapture,
    SandboxError,
    SandboxRequest,
    SandboxResult,
    Status,
    format_mode,
    signal_name,
)
from alphaapollo.tools.sandbox.zygote_process import ZygoteProcess

FORK_TIMEOUT = 30.0  # seconds until a child is ready
KILL_TIMEOUT = 10.0  # seconds until a killed child is gone
SESSION_CPU_SECONDS = 3600
OUTPUT_STOP_BYTES = 16 << 20  # of one run, after which it is stopped
_CHUNK = 1 << 16
_MAX_MESSAGES = 64  # of a child, read at a time


@dataclass(eq=False)
class _Run:
    request: SandboxRequest
    out: OutputCapture
    err: OutputCapture
    ended: asyncio.Future[dict[str, Any]]  # the zygote's notice, or one made of the child's DONE
    start: float
    timer: asyncio.TimerHandle | None = None
    stop_status: Status | None = None  # why the supervisor killed it


@dataclass(eq=False)
class _ChildHandle:
    id: int
    session: str
    control: socket.socket
    out: int
    err: int
    run: _Run | None = None
    is_ready: bool = False
    is_idle: bool = False  # known to the zygote


class Supervisor:
    """Owns one zygote, from its start (SandboxError: it does not start) to `close` or to the first failure.

    `layers` may be changed while nothing runs. `failure` says why it accepts no more runs.
    """

    def __init__(self, bubblewrap: bool, max_concurrent: int):
        self.zygote = ZygoteProcess(bubblewrap)
        self.layers: Collection[str] = ()
        self.failure = ""
        self._children: dict[int, _ChildHandle] = {}
        self._sessions: dict[str, _ChildHandle] = {}
        self._lost: set[str] = set()  # sessions with an ended process
        self._session_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(max_concurrent)
        self._num_children = 0
        self._lock = threading.Lock()  # no task is submitted once `failure` is set
        self._loop = asyncio.SelectorEventLoop()
        self._loop.set_exception_handler(lambda _, context: self._fail(context.get("exception") or context["message"]))
        self._loop.add_reader(self.zygote.socket, self._read_notice)
        self._thread = threading.Thread(target=self._run_loop, name="sandbox", daemon=True)
        self._thread.start()

    # Called from any thread

    def submit(self, request: SandboxRequest) -> Future[SandboxResult]:
        """Start a run. Cancelling the future kills the snippet."""
        with self._lock:
            if not self.failure:
                return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)
        future: Future[SandboxResult] = Future()
        future.set_exception(SandboxError(self.failure))
        return future

    def end_session(self, session: str) -> None:
        """Kill the session's process, if there is one."""
        self._schedule(lambda: self._end_session(session))

    def close(self) -> None:
        """Kill everything. Runs without a result fail."""
        self._schedule(lambda: self._fail("the sandbox is closed"))
        self._thread.join()

    def _schedule(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self.failure:
                self._loop.call_soon_threadsafe(callback)

    # Called in the thread

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.remove_reader(self.zygote.socket)
        self.zygote.end()
        for child in self._children.values():
            self._release(child)
            self._end_run(child, SandboxError(self.failure))
        self._loop.run_until_complete(self._cancel_tasks())
        self._loop.close()

    async def _cancel_tasks(self) -> None:
        await asyncio.sleep(0)  # creates the tasks that were submitted before the failure
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail(self, reason: object) -> None:
        with self._lock:
            if self.failure:
                return
            if isinstance(reason, Exception):
                reason = f"the sandbox failed: {type(reason).__name__}: {reason}{self.zygote.last_log_line()}"
            self.failure = str(reason)
        self._loop.stop()

    async def _answer(self, request: SandboxRequest) -> SandboxResult:
        """Result of a run. Every error but a cancellation by the caller becomes a SandboxError."""
        lock = self._session_locks.setdefault(request.session, asyncio.Lock()) if request.session else asyncio.Lock()
        try:
            async with lock, self._slots:
                return await self._run(request)
        except BaseException as error:
            was_cancelled = isinstance(error, asyncio.CancelledError) and not self.failure
            if was_cancelled or isinstance(error, SandboxError):
                raise
            raise SandboxError(self.failure or f"the sandbox failed: {type(error).__name__}: {error}") from error

    async def _run(self, request: SandboxRequest) -> SandboxResult:
        if self.failure:
            raise SandboxError(self.failure)
        child = self._sessions.get(request.session) or self._spawn(request)
        restarted = request.session in self._lost
        self._lost.discard(request.session)
        out, err = OutputCapture(request.max_output), OutputCapture(request.max_output)
        run = child.run = _Run(request, out, err, self._loop.create_future(), self._loop.time())
        try:
            self._set_deadline(child, request.timeout if child.is_ready else FORK_TIMEOUT)
            self._send_code(child, request)
            notice = await run.ended
        finally:
            if child.run is run:  # cancelled, or an exception before its end
                run.ended.cancel()
                self._end_run(child, SandboxError())
                self._forget_session(child)  # its process dies, but may still report the end of this run
                self._send_order(child, "kill")
        if not child.is_ready:
            text = notice["stop_reason"] or err.text().strip() or f"wait status {notice['status']}"
            raise SandboxError(f"a process could not be isolated: {text}")
        status, reason = wait_status(notice["status"], run.stop_status, request.timeout)
        if notice["stop_reason"] and not run.stop_status:
            status, reason = Status.ERROR, notice["stop_reason"]
        mode = format_mode(self.layers)
        return SandboxResult(status, out.text(), err.text(), notice["seconds"], mode, reason, restarted)

    def _spawn(self, request: SandboxRequest) -> _ChildHandle:
        self._num_children += 1
        cpu = SESSION_CPU_SECONDS if request.session else math.ceil(request.timeout) + 1
        spec = ChildSpec(self._num_children, list(self.layers), request.memory_mb, cpu, bool(request.session))
        with memory_file(request.stdin.encode("utf-8", "surrogatepass")) as stdin:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            out, out_write = os.pipe()
            err, err_write = os.pipe()
            with theirs, open(out_write, "wb"), open(err_write, "wb"):
                descriptors = [theirs.fileno(), stdin.fileno(), out_write, err_write]
                socket.send_fds(self.zygote.socket, [json.dumps(asdict(spec)).encode()], descriptors)
        child = self._children[spec.id] = _ChildHandle(spec.id, request.session, ours, out, err)
        ours.setblocking(False)
        self._loop.add_reader(ours, self._read_control, child)
        for descriptor in (out, err):
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read_output, child, descriptor)
        if request.session:
            self._sessions[request.session] = child
        return child

    def _send_code(self, child: _ChildHandle, request: SandboxRequest) -> None:
        if child.is_idle:
            self._send_order(child, "busy")
        gone_or_full = (BrokenPipeError, BlockingIOError)  # the deadline ends such a run
        with memory_file(request.code.encode("utf-8", "surrogatepass")) as code, contextlib.suppress(*gone_or_full):
            socket.send_fds(child.control, [json.dumps({"echo": request.echo}).encode()], [code.fileno()])

    def _send_order(self, child: _ChildHandle, order: str) -> None:
        """`order`: kill, or between two snippets of a session idle, and then busy."""
        child.is_idle = order == "idle"
        self.zygote.socket.send(json.dumps({order: child.id}).encode())

    def _set_deadline(self, child: _ChildHandle, seconds: float) -> None:
        assert child.run is not None
        if child.run.timer:
            child.run.timer.cancel()
        child.run.timer = self._loop.call_later(seconds, self._stop, child, Status.TIMEOUT)

    def _stop(self, child: _ChildHandle, status: Status) -> None:
        assert child.run is not None
        if child.run.stop_status:
            self._fail("the sandbox failed: a killed process does not end")
            return
        child.run.stop_status = status
        self._set_deadline(child, KILL_TIMEOUT)
        self._send_order(child, "kill")

    def _read_control(self, child: _ChildHandle) -> None:
        """Read what a child reports: it is ready, or a session's snippet is done."""
        for _ in range(_MAX_MESSAGES):
            try:
                message = child.control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                message = b""
            if not message:
                self._loop.remove_reader(child.control)
                return
            run = child.run
            if message == READY and not child.is_ready and run:
                child.is_ready, run.start = True, self._loop.time()
                self._set_deadline(child, run.request.timeout)
            elif message[:1] == DONE and len(message) == 2 and child.session and run and not run.stop_status:
                self._drain(child)
                self._send_order(child, "idle")  # if the report is false, the zygote kills it for computing on
                seconds = self._loop.time() - run.start
                self._end_run(child, {"status": message[1] << 8, "seconds": seconds, "stop_reason": ""})

    def _read_output(self, child: _ChildHandle, descriptor: int) -> bool:
        """Read one chunk of output. False if there is no more for now."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(descriptor)
            return False
        if (run := child.run) is not None:  # None: output of a thread that a session's snippet left behind
            (run.out if descriptor == child.out else run.err).feed(data)
            if run.out.total + run.err.total > OUTPUT_STOP_BYTES and not run.stop_status:
                self._stop(child, Status.OUTPUT)
        return True

    def _drain(self, child: _ChildHandle) -> None:
        for descriptor in (child.out, child.err):
            for _ in range(OUTPUT_STOP_BYTES // _CHUNK):
                if not self._read_output(child, descriptor):
                    break

    def _read_notice(self) -> None:
        """Handle the zygote's notice that a child has ended."""
        message = self.zygote.socket.recv(MESSAGE_BYTES)
        if not message:
            self._fail(f"the sandbox failed: the pre-forked interpreter died{self.zygote.last_log_line()}")
            return
        notice = json.loads(message)
        child = self._children.pop(notice["exit"])
        self._read_control(child)
        self._drain(child)
        self._release(child)
        self._forget_session(child)
        self._end_run(child, notice)

    def _forget_session(self, child: _ChildHandle) -> None:
        """Note that the variables of the child's session are lost, if it has one."""
        if child.session and self._sessions.get(child.session) is child:
            del self._sessions[child.session]
            self._lost.add(child.session)

    def _end_run(self, child: _ChildHandle, notice: dict[str, Any] | SandboxError) -> None:
        """Separate a child from its run, if it has one, and give the run its end."""
        run, child.run = child.run, None
        if run is None:
            return
        if run.timer is not None:
            run.timer.cancel()
        if not run.ended.done():  # done: the caller cancelled the run in this turn of the loop
            run.ended.set_exception(notice) if isinstance(notice, SandboxError) else run.ended.set_result(notice)

    def _release(self, child: _ChildHandle) -> None:
        """Close the descriptors of a child that has ended."""
        for file in (child.control, child.out, child.err):
            self._loop.remove_reader(file)
        child.control.close()
        os.close(child.out)
        os.close(child.err)

    def _end_session(self, session: str) -> None:
        self._lost.discard(session)
        child = self._sessions.pop(session, None)
        if child is None:
            return
        self._end_run(child, SandboxError("the session was closed"))
        self._send_order(child, "kill")


def memory_file(data: bytes) -> BinaryIO:
    """Sealed file in memory, opened at its beginning."""
    file = open(os.memfd_create("snippet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")  # noqa: SIM115
    file.write(data)
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def wait_status(status: int, stop_status: Status | None, timeout: float) -> tuple[Status, str]:
    """Status and reason of a process that ended with this wait status. `stop_status`: why the supervisor killed it."""
    if stop_status is Status.TIMEOUT or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return Status.TIMEOUT, f"stopped after {timeout:g} s"
    if stop_status is Status.OUTPUT:
        return Status.OUTPUT, f"stopped after printing {OUTPUT_STOP_BYTES >> 20} MiB"
    if os.WIFEXITED(status):
        if (code := os.WEXITSTATUS(status)) == 0:
            return Status.OK, ""
        return (Status.MEMORY, "MemoryError") if code == EXIT_MEMORY else (Status.ERROR, f"exit code {code}")
    if (number := os.WTERMSIG(status)) == signal.SIGKILL:
        return Status.MEMORY, "killed by the kernel: no memory left on the machine"
    return Status.ERROR, f"killed by {signal_name(number)}"
