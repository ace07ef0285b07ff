"""Engine in a process of its own, with the Python of another environment: the owner's side, and the server's side.

    owner: RemoteEngine --- socket --- server: the engine's library, e.g. SGLang --- its scheduler

The server has the engine's signal handlers, environment variables and log. It exits when the socket is closed, and if
it ends, all calls of the owner fail. A message is a pickle with its length before it: a call (number, method,
arguments), or an answer (number, error, result).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from alphaapollo.engines.http_api import HttpApiSettings
from alphaapollo.engines.process import build_process_environment, find_last_error, make_death_error
from alphaapollo.engines.protocol import Engine, EngineDied, EngineError, EngineSpec, HttpAnswer, HttpSampling
from alphaapollo.processes.watchdog import list_child_pids
from alphaapollo.types import Completion, ImageInput, Sampling, WeightReceipt
from alphaapollo.weight_sync.transport import UpdateInfo

CANCEL = "cancel"
CLOSE_SECONDS = 20.0  # for the server to end its processes
PROGRESS_SECONDS = 0.5  # time between two reports of the progress counter
LENGTH = struct.Struct("!Q")  # bytes of the message that follows
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "EngineDied": EngineDied}
# The code of this process comes last in the server's search path, because this environment may have other versions.
SERVE = "import sys; sys.path.append(sys.argv[1]); from {module} import main; main(int(sys.argv[2]))"


class RemoteEngine(Engine):
    """Engine whose methods run in a server process.

    python: interpreter of the server. module: module whose `main(fd)` calls `serve` with the engine.
    """

    def __init__(self, spec: EngineSpec, python: Path, module: str, environment: Mapping[str, str]):
        self.spec = spec
        self._python, self._module, self._environment = python, module, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._death: EngineError | None = None
        self._progress = 0
        self._started = False

    async def preload_libraries(self) -> None:
        """Start the server, which imports its libraries."""
        if self._process is not None:
            return
        log = Path(self.spec.log_path)
        log.parent.mkdir(parents=True, exist_ok=True)
        own, theirs = socket.socketpair()
        code, root = SERVE.format(module=self._module), Path(__file__).parents[2]
        own_variables = build_process_environment(self.spec.log_path, self.spec.cleanup_folders)
        with theirs, log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    [str(self._python), "-P", "-c", code, str(root), str(theirs.fileno())],
                    env={**os.environ, **self._environment, **own_variables},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for the owner
                )
            except OSError as error:
                own.close()
                raise EngineError(
                    f"{self.spec.name} did not start: {error}. Install the engine's environment on this node "
                    "(docs/engines.md)."
                ) from error
        reader, self._writer = await asyncio.open_connection(sock=own)
        self._reading = asyncio.create_task(self._read_answers(reader))
        write_message(self._writer, self.spec)

    async def start(self) -> None:
        await self.preload_libraries()
        await self._call("start")
        self._started = True

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_message(reader)) is not None:
            number, error, result = message
            if number == 0:
                self._progress = result
            elif (answer := self._pending.pop(number, None)) and not answer.done():
                if error:
                    answer.set_exception(ERRORS.get(error, EngineError)(result))
                else:
                    answer.set_result(result)
        assert self._process is not None
        code = await asyncio.to_thread(self._process.wait)
        self._death = make_death_error(self.spec)
        if code >= 0 and not self._started:  # a restart would fail again
            last = find_last_error(self.spec.log_path)
            self._death = EngineError(f"{self.spec.name} did not start{last}. See its log {self.spec.log_path}")
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(self._death)

    async def _call(self, method: str, *arguments: object) -> Any:
        """Call a method of the engine in the server. Raises its ValueError or EngineError, EngineDied if it dies."""
        if self._writer is None:
            raise EngineError(f"{self.spec.name} is not running. Call start() first.")
        if self._death is not None:
            raise type(self._death)(str(self._death))
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        write_message(self._writer, (number, method, arguments))
        try:
            return await answer
        except asyncio.CancelledError:
            if self._writer is not None:
                write_message(self._writer, (number, CANCEL, ()))
            raise
        finally:
            self._pending.pop(number, None)

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        self.spec.check_request_length(len(token_ids), sampling.max_tokens)
        completion: Completion = await self._call("generate", token_ids, sampling, request_id)
        token_ids, logprobs = list(completion.token_ids), list(completion.logprobs)  # pickles have arrays
        return replace(completion, token_ids=token_ids, logprobs=logprobs)

    async def log_probs(self, token_ids: list[int], images: Sequence[ImageInput] = ()) -> list[float]:
        logprobs: list[float] = await self._call("log_probs", token_ids)
        return logprobs

    def build_http_app(self, settings: HttpApiSettings) -> Any:
        """Return vLLM's HTTP API over this engine."""
        from alphaapollo.engines.vllm.front_end import RemoteFrontEnd  # imports vLLM

        return RemoteFrontEnd(self.spec, self._answer_http).build_http_app(settings)

    async def _answer_http(self, token_ids: list[int], request: HttpSampling, request_id: str) -> HttpAnswer:
        answer: HttpAnswer = await self._call("answer_http", token_ids, request, request_id)
        return answer

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def receive_weights(self, folder: str) -> None:
        await self._call("receive_weights", folder)

    async def confirm_weights(self, version: int) -> WeightReceipt | None:
        receipt: WeightReceipt | None = await self._call("confirm_weights", version)
        return receipt

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake_weights(self) -> None:
        await self._call("wake_weights")

    async def release_cache(self) -> None:
        await self._call("release_cache")

    async def wake_cache(self) -> None:
        await self._call("wake_cache")

    # The trainer calls these methods over CUDA IPC and NCCL (weight_sync/transfer.py).

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        await self._call("init_weight_transfer_engine", init_info)

    async def start_weight_update(self) -> None:
        await self._call("start_weight_update")

    async def update_weights(self, update_info: UpdateInfo) -> None:
        await self._call("update_weights", update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._call("finish_weight_update")

    def list_pids(self) -> list[int]:
        """Return the pids of the server's children, which run the model, and of the server."""
        if self._process is None or self._process.poll() is not None:
            return []
        return [*list_child_pids(self._process.pid), self._process.pid]

    def get_progress_counter(self) -> int:
        return self._progress

    async def close(self) -> None:
        process, self._process = self._process, None
        writer, self._writer = self._writer, None
        if process is None:
            return
        if self._reading is not None:
            self._reading.cancel()
        for answer in self._pending.values():
            answer.cancel()
        if writer is not None:
            writer.close()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, CLOSE_SECONDS)
        if process.poll() is None:
            process.kill()


def write_message(writer: asyncio.StreamWriter, message: object) -> None:
    data = pickle.dumps(message)
    writer.write(LENGTH.pack(len(data)) + data)


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Return the next message, or None if the other process closed the socket."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def receive_spec(fd: int) -> tuple[EngineSpec, asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect the server to its owner, and return the settings of the engine."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    return await read_message(reader), reader, writer


async def serve(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Run the owner's calls of the engine until the owner closes the socket."""
    running: dict[int, asyncio.Future[object]] = {}

    def send_answer(number: int, method: str, call: asyncio.Future[object]) -> None:
        del running[number]
        if call.cancelled():
            return
        error = call.exception()
        if error is None:
            write_message(writer, (number, "", call.result()))
        elif isinstance(error, ValueError | EngineError):
            write_message(writer, (number, type(error).__name__, str(error)))
        else:
            traceback.print_exception(error)
            write_message(writer, (number, "EngineError", f"{method} failed: {type(error).__name__}: {error}"))

    async def report_progress() -> NoReturn:
        last = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            if (count := engine.get_progress_counter()) != last:
                last = count
                write_message(writer, (0, "", count))

    reporting = asyncio.create_task(report_progress())
    while (message := await read_message(reader)) is not None:
        number, method, arguments = message
        if method == CANCEL:
            if number in running:
                running[number].cancel()
        else:
            running[number] = asyncio.ensure_future(getattr(engine, method)(*arguments))
            running[number].add_done_callback(partial(send_answer, number, method))
    reporting.cancel()
    await engine.close()
    sys.stdout.flush()
