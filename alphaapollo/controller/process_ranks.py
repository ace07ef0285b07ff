"""Workers as processes of this machine, forked from one fork server (trainer.controller=local with several workers).

    driver --- fork server (imports the workers' libraries once) --- policy 0, policy 1, rollout 0, ...

Each worker has one connection to the driver. Threads on both sides send and receive, so that a stopped worker does not
block the driver, and a worker reports while it computes. A closed connection means that the other process has ended.

    driver -> worker    call of a method of WorkerServer, or the answer to a call
    worker -> driver    the answer to a call, or a call of all engines
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TypeVar

import setproctitle

from alphaapollo.controller.errors import WorkerDied, WorkerFailed, explain_worker_error
from alphaapollo.controller.ranks import Result, await_if_awaitable
from alphaapollo.controller.remote_ranks import RemoteRanks, WorkerHost, WorkerLocation
from alphaapollo.controller.worker_groups import LOCAL_NODE
from alphaapollo.engines.types import EngineError
from alphaapollo.processes.fork_server import ForkedProcess
from alphaapollo.processes.host import format_signal
from alphaapollo.processes.network import reserve_port

W = TypeVar("W")

LOOPBACK = "127.0.0.1"
RESULT, ERROR = "result", "error"  # answers; any other message is a call of the method with this name


class ProcessEnded(Exception):
    """Error of a call of a process that has ended. The message says how the process ended."""


class Channel:
    """One side of a connection: sends calls to the other process, and answers its calls.

    serve: function that starts to answer a call, given its number, its method and its pickled arguments. peer: name of
    the other process in errors."""

    def __init__(self, connection: Connection, serve: Callable[[int, str, bytes], None], peer: str):
        self._connection, self._serve, self._peer = connection, serve, peer
        self._numbers, self._calls = itertools.count(), dict[int, Future[Result]]()
        self._lock, self._end_reason = threading.Lock(), ""
        self._outgoing: SimpleQueue[tuple[int, str, bytes]] = SimpleQueue()
        threading.Thread(target=self._send_messages, name="send", daemon=True).start()

    def call(self, method: str, *arguments: object) -> Future[Result]:
        """Call a method of the other process."""
        call, number = Future[Result](), next(self._numbers)
        call.set_running_or_notify_cancel()  # a cancelled wait does not cancel the call
        with self._lock:
            if self._end_reason:
                call.set_exception(ProcessEnded(self._end_reason))
                return call
            self._calls[number] = call
        self.put(number, method, arguments)
        return call

    def put(self, number: int, kind: str, content: object) -> None:
        """Send a call, or the answer to the call of this number. Raises an error if `content` cannot be pickled."""
        self._outgoing.put((number, kind, pickle.dumps(content, pickle.HIGHEST_PROTOCOL)))

    def _send_messages(self) -> None:
        with suppress(OSError):  # the other process has ended, which `receive_messages` notices
            while True:
                self._connection.send_bytes(pickle.dumps(self._outgoing.get(), pickle.HIGHEST_PROTOCOL))

    def receive_messages(self) -> None:
        """Receive calls and answers until the other process ends."""
        with suppress(EOFError, OSError):
            while True:
                number, kind, content = pickle.loads(self._connection.recv_bytes())
                if kind in (RESULT, ERROR):
                    self._end_call(self._calls.pop(number), kind, content)
                else:
                    self._serve(number, kind, content)

    def end_calls(self, reason: str) -> None:
        """Raise ProcessEnded for all calls that wait for an answer, and for all later calls."""
        with self._lock:
            self._end_reason = reason
        for call in self._calls.values():
            call.set_exception(ProcessEnded(reason))

    def _end_call(self, call: Future[Result], kind: str, content: bytes) -> None:
        try:
            value = pickle.loads(content)
        except Exception as error:  # noqa: BLE001  a class of the user's may fail to unpickle
            kind, value = ERROR, WorkerFailed(f"an answer of {self._peer} cannot be read: {error}")
        if kind == RESULT:
            call.set_result(value)
        else:
            call.set_exception(value)


class WorkerProcess:
    """The driver's side of one worker process. The constructor blocks until the process runs.

    call_engines: calls a method of all engines, for a worker that asks for it."""

    def __init__(self, role: str, rank: int, call_engines: Callable[..., None]):
        drivers_end, workers_end = multiprocessing.Pipe()
        self._process = ForkedProcess(target=serve_worker, args=(workers_end, role, rank, os.getcwd()))
        self._process.start()
        workers_end.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._call_engines = call_engines
        self._channel = Channel(drivers_end, self._serve_engine_call, f"the {role} worker of rank {rank}")
        self.call, self.kill = self._channel.call, self._process.kill
        threading.Thread(target=self._receive_messages, name=f"{role} {rank}", daemon=True).start()

    def _receive_messages(self) -> None:
        self._channel.receive_messages()
        self._process.join()
        code = self._process.exitcode or 0
        self._channel.end_calls(f"exit code {code}" if code >= 0 else format_signal(-code))

    def _serve_engine_call(self, number: int, method: str, content: bytes) -> None:
        threading.Thread(target=self._answer_engine_call, args=(number, content), daemon=True).start()

    def _answer_engine_call(self, number: int, content: bytes) -> None:
        try:
            self._call_engines(*pickle.loads(content))
            self._channel.put(number, RESULT, None)
        except EngineError as error:
            self._channel.put(number, ERROR, error)


class ProcessRanks(RemoteRanks[W]):
    """Workers of one role as forked processes. call_engines: see WorkerProcess."""

    def __init__(self, role: str, size: int, call_engines: Callable[..., None]):
        super().__init__(role, size, LOCAL_NODE)
        self._call_engines = call_engines
        self.processes: list[WorkerProcess] = []

    async def locate_workers(self) -> list[WorkerLocation]:
        """Fork one process per rank, then ask the workers where they run."""
        for rank in range(self.size):
            self.processes.append(await asyncio.to_thread(WorkerProcess, self.role, rank, self._call_engines))
        self.process_names = [f"pid {process.pid}" for process in self.processes]
        return await super().locate_workers()

    def _request(self, rank: int, method: str, *arguments: object) -> Future[Result]:
        return self.processes[rank].call(method, *arguments)

    async def close(self) -> None:
        for process in self.processes:
            process.kill()

    def _convert_error(self, rank: int, error: BaseException) -> Exception:
        if isinstance(error, ProcessEnded):
            worker = f"the {self.role} worker of rank {rank} ({self.process_names[rank]})"
            return WorkerDied(f"{worker} died: {error}", self.role)
        assert isinstance(error, Exception)
        return error  # its message names the worker


class WorkerServer(WorkerHost[object]):
    """The worker's side of the connection."""

    def __init__(self, connection: Connection, role: str, rank: int):
        self.channel, self._role = Channel(connection, self._serve, "the driver"), role
        self._name = f"the {role} worker of rank {rank}"

    async def serve(self) -> None:
        """Answer calls until the driver ends."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive_messages, name="receive", daemon=True).start()
        await self._loop.create_future()

    def _receive_messages(self) -> None:
        self.channel.receive_messages()
        os._exit(1)  # the driver has ended

    def _serve(self, number: int, method: str, content: bytes) -> None:
        if method == "report":  # in this thread, while the worker computes
            self.channel.put(number, RESULT, self.report(*pickle.loads(content)))
        else:
            asyncio.run_coroutine_threadsafe(self._answer(number, method, content), self._loop)

    async def _answer(self, number: int, method: str, content: bytes) -> None:
        try:
            self.channel.put(number, RESULT, await await_if_awaitable(getattr(self, method)(*pickle.loads(content))))
        except Exception as cause:  # noqa: BLE001  the driver raises it
            trace = "".join(traceback.format_exception(cause))
            self.channel.put(number, ERROR, explain_worker_error(self._name, self._role, cause, trace))

    def locate(self, reserves_address: bool) -> WorkerLocation:
        address = f"tcp://{LOOPBACK}:{reserve_port(LOOPBACK)}" if reserves_address else ""
        return WorkerLocation(os.getpid(), LOCAL_NODE, LOOPBACK, "", address)


_server: WorkerServer | None = None  # of this process, if it is a worker


def serve_worker(connection: Connection, role: str, rank: int, working_folder: str) -> None:
    """Main function of a worker process. It ends with the driver."""
    global _server
    os.setsid()  # signals of the terminal go to the driver alone
    os.chdir(working_folder)
    setproctitle.setproctitle(f"alphaapollo::{role} {rank}")
    _server = WorkerServer(connection, role, rank)
    asyncio.run(_server.serve())


def call_engines_of_run(method: str, *arguments: object) -> None:
    """Call a method of the weight transfer on all engines of the run and wait for them. Called in a worker process."""
    assert _server is not None
    _server.channel.call("call_engines", method, *arguments).result()
