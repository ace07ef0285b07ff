"""Workers as processes of this machine, forked from one fork server (trainer.controller=local with several workers).

    driver --- fork server (imports the workers' libraries once) --- policy 0, policy 1, rollout 0, ...

Each worker has one connection to the driver. Threads on both sides send and receive, so that a stopped worker does not
block the driver, and a worker reports while it computes. A closed connection means that the other process has ended.

    driver -> worker    number of the call, method of WorkerServer, pickled arguments
    worker -> driver    number of the call, outcome, pickled content: a result or a message
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import setproctitle

from alphaapollo.controller.ranks import WorkerDied, WorkerFailed, await_if_awaitable
from alphaapollo.controller.remote_ranks import RemoteRanks, WorkerLocation, explain_worker_error, pickle_function
from alphaapollo.controller.worker_groups import LOCAL_NODE
from alphaapollo.engines.protocol import EngineDied, EngineError
from alphaapollo.processes.fork_server import ForkedProcess
from alphaapollo.processes.host import format_signal
from alphaapollo.processes.network import reserve_port
from alphaapollo.utils.heartbeat import HEARTBEAT, Report, dump_stacks

W = TypeVar("W")
Message = tuple[int, str, bytes]

LOOPBACK = "127.0.0.1"
RESULT, ENGINE_CALL = "result", "engine call"  # outcomes; any other is the name of an exception class
IN_RECEIVING_THREAD = ("report", "collect_stacks", "receive_engine_answer")  # methods that a computing worker answers


class ProcessEnded(Exception):
    """Error of a call whose process has ended. The message says how it ended."""


class ProcessCall(Future[Any]):
    """Call that has been sent to a worker process."""

    def future(self) -> Future[Any]:
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class Channel:
    """One side of a connection, with a thread that sends messages in order."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._outgoing: SimpleQueue[Message] = SimpleQueue()
        threading.Thread(target=self._send_messages, name="send", daemon=True).start()

    def put(self, number: int, name: str, content: object) -> None:
        self._outgoing.put((number, name, pickle.dumps(content, pickle.HIGHEST_PROTOCOL)))

    def _send_messages(self) -> None:
        with suppress(OSError):  # the other process has ended, which `receive` reports
            while True:
                self._connection.send_bytes(pickle.dumps(self._outgoing.get(), pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Message | None:
        """Wait for a message. Returns None if the other process has ended."""
        try:
            message: Message = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return message


class WorkerProcess:
    """The driver's side of one worker process. The constructor blocks until the process runs.

    call_engines: calls a method of all engines, for a worker that asks for it.
    """

    def __init__(self, role: str, rank: int, call_engines: Callable[..., None]):
        own_end, its_end = multiprocessing.Pipe()
        self._process = ForkedProcess(target=serve_worker, args=(its_end, role, rank, os.getcwd()))
        self._process.start()
        its_end.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._role, self._call_engines = role, call_engines
        self._channel, self._numbers = Channel(own_end), itertools.count()
        self._lock, self._end = threading.Lock(), ""
        self._calls: dict[int, ProcessCall] = {}
        threading.Thread(target=self._receive_outcomes, name=f"{role} {rank}", daemon=True).start()

    def send(self, method: str, *arguments: object) -> ProcessCall:
        """Call a method of the process's WorkerServer."""
        call, number = ProcessCall(), next(self._numbers)
        call.set_running_or_notify_cancel()  # a cancelled wait does not cancel the call
        with self._lock:
            if self._end:
                call.set_exception(ProcessEnded(self._end))
                return call
            self._calls[number] = call
        self._channel.put(number, method, arguments)
        return call

    def kill(self) -> None:
        self._process.kill()

    def _receive_outcomes(self) -> None:
        while message := self._channel.receive():
            number, outcome, content = message
            if outcome == ENGINE_CALL:
                threading.Thread(target=self._answer_engine_call, args=(number, content), daemon=True).start()
            else:
                self._end_call(self._calls.pop(number), outcome, content)
        self._process.join()
        code = self._process.exitcode or 0
        with self._lock:
            self._end = f"exit code {code}" if code >= 0 else format_signal(-code)
        for call in self._calls.values():
            call.set_exception(ProcessEnded(self._end))

    def _end_call(self, call: ProcessCall, outcome: str, content: bytes) -> None:
        try:
            value = pickle.loads(content)
        except Exception as error:  # noqa: BLE001  a class of the user's may fail to unpickle
            outcome, value = WorkerFailed.__name__, f"a result of the {self._role} worker cannot be read: {error}"
        if outcome == RESULT:
            call.set_result(value)
        elif outcome == WorkerDied.__name__:
            call.set_exception(WorkerDied(value, self._role))
        else:
            call.set_exception((ValueError if outcome == ValueError.__name__ else WorkerFailed)(value))

    def _answer_engine_call(self, number: int, content: bytes) -> None:
        """Call a method of all engines for the worker."""
        error: Exception | None = None
        try:
            self._call_engines(*pickle.loads(content))
        except (EngineDied, EngineError) as failure:
            error = failure
        self.send("receive_engine_answer", number, error)


class ProcessRanks(RemoteRanks[W]):
    """Workers of one role as forked processes. call_engines: see WorkerProcess."""

    transport_errors = (ProcessEnded,)

    def __init__(self, role: str, size: int, call_engines: Callable[..., None]):
        super().__init__(role, size)
        self._call_engines = call_engines
        self.processes: list[WorkerProcess] = []

    async def locate_workers(self) -> list[WorkerLocation]:
        for rank in range(self.size):
            self.processes.append(await asyncio.to_thread(WorkerProcess, self.role, rank, self._call_engines))
        self.process_names = [f"pid {process.pid}" for process in self.processes]
        self._locations = [WorkerLocation(process.pid, "", LOOPBACK, "") for process in self.processes]
        address = await self._wait_for_call(0, self.processes[0].send("reserve_address"))
        return [WorkerLocation(process.pid, LOCAL_NODE, LOOPBACK, "", address) for process in self.processes]

    async def start(
        self, builders: Sequence[Callable[[], Awaitable[W] | W]], environment_variables: Sequence[dict[str, str]]
    ) -> None:
        each = zip(self.processes, builders, environment_variables, strict=True)
        calls = [process.send("start", cloudpickle.dumps(build), variables) for process, build, variables in each]
        await self._wait_for_all_calls(calls, "start")

    def send(self, rank: int, function: bytes, *arguments: object) -> ProcessCall:
        return self.processes[rank].send("call", function, *arguments)

    def call_engines(self, method: str, *arguments: object) -> None:
        """Call a method of the weight transfer on all engines and wait for them. For ranks of rollout workers."""
        code = pickle_function(lambda worker: getattr(worker.engine, method)(*arguments))
        calls = [self.send(rank, code) for rank in range(self.size)]
        for rank, call in enumerate(calls):
            try:
                call.result()
            except (ProcessEnded, WorkerDied, WorkerFailed, ValueError) as error:
                failure = self._convert_error(rank, error)
                kind = EngineDied if isinstance(failure, WorkerDied) else EngineError
                raise kind(f"a weight transfer failed: {failure}") from None

    async def close(self) -> None:
        for process in self.processes:
            process.kill()

    def _send_to_health_thread(self, rank: int, method: str, *arguments: object) -> ProcessCall:
        return self.processes[rank].send(method, *arguments)

    def _convert_error(self, rank: int, error: BaseException) -> Exception:
        if isinstance(error, ProcessEnded):
            worker = f"the {self.role} worker of rank {rank} ({self.process_names[rank]})"
            return WorkerDied(f"{worker} died: {error}", self.role)
        assert isinstance(error, Exception)
        return error  # the worker has named itself


class WorkerServer:
    """The worker's side: owns the worker and answers the driver's calls. Calls of async methods overlap; a call of any
    other method blocks the process, except its reports, until it returns."""

    def __init__(self, connection: Connection, role: str, rank: int):
        self._channel, self._role = Channel(connection), role
        self._name = f"the {role} worker of rank {rank}"
        self._tasks: set[asyncio.Task[None]] = set()
        self._engine_calls: dict[int, Future[Exception | None]] = {}
        self._numbers = itertools.count()

    async def serve(self) -> None:
        """Answer calls until the driver ends."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._receive_calls, args=(loop,), name="receive", daemon=True).start()
        await loop.create_future()

    def _receive_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        while message := self._channel.receive():
            if message[1] in IN_RECEIVING_THREAD:
                number, method, content = message
                self._channel.put(number, RESULT, getattr(self, method)(*pickle.loads(content)))
            else:
                loop.call_soon_threadsafe(self._start_call, *message)
        os._exit(1)  # the driver has ended

    def _start_call(self, number: int, method: str, content: bytes) -> None:
        task = asyncio.ensure_future(self._answer(number, method, content))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, method: str, content: bytes) -> None:
        try:
            self._channel.put(number, RESULT, await getattr(self, method)(*pickle.loads(content)))
        except Exception as cause:  # noqa: BLE001  the driver raises it
            trace = "".join(traceback.format_exception(cause))
            error = explain_worker_error(self._name, self._role, cause, trace)
            self._channel.put(number, type(error).__name__, str(error))

    async def reserve_address(self) -> str:
        """Return an address for the rendezvous of torch.distributed, which this process reserves."""
        return f"tcp://{LOOPBACK}:{reserve_port(LOOPBACK)}"

    async def start(self, build: bytes, variables: dict[str, str]) -> None:
        """Build the worker. variables: environment variables to set first."""
        os.environ.update(variables)
        self.worker = await await_if_awaitable(cloudpickle.loads(build)())

    async def call(self, function: bytes, *arguments: object) -> Any:
        """Call function(worker, *arguments) and return the result. The function is pickled by `pickle_function`."""
        return await await_if_awaitable(cloudpickle.loads(function)(self.worker, *arguments))

    def report(self) -> Report:
        return HEARTBEAT.make_report()

    def collect_stacks(self, pids: Sequence[int]) -> str:
        return dump_stacks(pids)

    def call_engines(self, method: str, *arguments: object) -> None:
        """Call a method of all engines through the driver and wait for them. Raises EngineDied or EngineError."""
        number, answer = next(self._numbers), Future[Exception | None]()
        self._engine_calls[number] = answer
        self._channel.put(number, ENGINE_CALL, (method, *arguments))
        if error := answer.result():
            raise error

    def receive_engine_answer(self, number: int, error: Exception | None) -> None:
        self._engine_calls.pop(number).set_result(error)


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
    _server.call_engines(method, *arguments)
