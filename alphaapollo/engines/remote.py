"""Engine in a process of its own (processes/host.py), with the Python of another environment.

    owner: RemoteEngine --- pipes --- server: the engine's library, e.g. SGLang --- its scheduler

The server has the engine's signal handlers, environment variables and log. It exits when the owner closes its pipe, and
if it ends, all calls of the owner fail. A request is a pickled (method, arguments), and a reply a pickled (error,
result), each as one line of base64."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import isawaitable
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from alphaapollo.engines.process import build_process_environment, make_death_error, make_start_error
from alphaapollo.engines.protocol import Engine
from alphaapollo.engines.types import EngineDied, EngineError, EngineSpec, HttpAnswer, HttpSampling
from alphaapollo.engines.weight_sync.transport import WeightReceipt
from alphaapollo.processes.host import MAX_REPLY, ProcessDiedError, ProcessHost
from alphaapollo.processes.watchdog import list_child_pids
from alphaapollo.types import Completion, ImageInput, Sampling

CANCEL = "cancel"  # method of a request that cancels an earlier request
CLOSE_SECONDS = 20.0  # for the server to end its processes
PROGRESS_SECONDS = 0.5  # time between two reads of the progress counter
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "EngineDied": EngineDied}  # all others: EngineError
# The code of this process comes last in the server's search path, because this environment may have other versions.
SERVER_CODE = "import sys; sys.path.append(sys.argv[1]); from {module} import main; main()"
SPEC_VARIABLE = "ALPHAAPOLLO_ENGINE_SPEC"  # other users cannot read the server's variables, unlike its command line
FORWARDED = (
    *("log_probs", "pause", "resume", "sleep", "release_cache", "wake_weights", "wake_cache"),
    *("receive_weights", "init_weight_transfer_engine", "start_weight_update", "update_weights"),
    "finish_weight_update",
)
"""Methods of Engine that run only in the server, where they also check the order of the calls."""


class RemoteEngine(Engine):
    """Engine whose methods run in a server process.

    python: interpreter of the server. module: module whose `main` calls `serve` with the engine of `receive_spec`."""

    def __init__(self, spec: EngineSpec, python: Path, module: str, environment: Mapping[str, str]):
        super().__init__(spec)
        self._python, self._module, self._environment = python, module, environment
        self._host: ProcessHost | None = None
        self._polling: asyncio.Task[None] | None = None
        self._progress = 0
        self._started = False
        self._death: EngineError | None = None

    async def preload_libraries(self) -> None:
        """Start the server, which imports its libraries."""
        if self._host is not None:
            return
        log = Path(self.spec.log_path)
        log.parent.mkdir(parents=True, exist_ok=True)
        code, root = SERVER_CODE.format(module=self._module), Path(__file__).parents[2]
        command = [str(self._python), "-P", "-c", code, str(root)]
        own_variables = build_process_environment(self.spec.log_path, self.spec.cleanup_folders)
        own_variables[SPEC_VARIABLE] = encode(self.spec).decode().strip()
        with log.open("ab") as output:
            try:
                environment = {**os.environ, **self._environment, **own_variables}
                self._host = await ProcessHost.start(command, environment, output)
            except OSError as error:
                raise EngineError(
                    f"{self.name} did not start: {error}. Install the engine's environment on this node "
                    "(docs/engines.md)."
                ) from error
        self._polling = asyncio.create_task(self._poll_progress())

    async def _poll_progress(self) -> None:
        with suppress(EngineError):  # if the server dies, other calls report it
            while True:
                self._progress = await self._call("get_progress_counter")
                await asyncio.sleep(PROGRESS_SECONDS)

    async def start(self) -> None:
        await self.preload_libraries()
        await self._call("start")
        self._started = True

    async def _call(self, method: str, *arguments: object) -> Any:
        """Call a method of the server's engine. Raises its ValueError or EngineError; EngineDied if the server dies."""
        if (host := self._host) is None:
            error_class = EngineDied if self.awaits_weights_after_restart else EngineError
            raise error_class(f"{self.name} is not running. Call start() first.")
        number, reply = host.send(encode((method, arguments)))
        try:
            error_name, result = decode(await reply)
        except asyncio.CancelledError:
            host.send(encode((CANCEL, (number,))))
            raise
        except ProcessDiedError as death:
            if self._death is None:
                may_restart = self._started or (host.exit_code or 0) < 0
                self._death = (make_death_error if may_restart else make_start_error)(self.spec)
            raise type(self._death)(str(self._death)) from death
        if error_name:
            failure = ERRORS.get(error_name, EngineError)(result)
            self._death = failure if isinstance(failure, EngineDied) else self._death
            raise failure
        return result

    @property
    def is_dead(self) -> bool:
        return self._death is not None or (self._host is not None and self._host.has_closed_output)

    async def restart(self) -> None:
        self._death, self._started = None, False
        await super().restart()

    async def confirm_weights(self, version: int) -> WeightReceipt | None:
        receipt: WeightReceipt | None = await self._call("confirm_weights", version)
        self.awaits_weights_after_restart = False
        return receipt

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        self.spec.check_request_length(len(token_ids), sampling.max_tokens)
        self.check_has_weights()
        completion: Completion = await self._call("generate", token_ids, sampling, request_id)
        sampled_ids, logprobs = list(completion.token_ids), list(completion.logprobs)  # arrays after unpickling
        return replace(completion, token_ids=sampled_ids, logprobs=logprobs)

    async def answer_http(self, token_ids: list[int], request: HttpSampling, request_id: str) -> HttpAnswer:
        self.check_has_weights()
        answer: HttpAnswer = await self._call("answer_http", token_ids, request, request_id)
        return answer

    def list_pids(self) -> list[int]:
        """Return the pids of the server's children, which run the model, and of the server."""
        if self._host is None or not self._host.is_running:
            return []
        return [*list_child_pids(self._host.pid), self._host.pid]

    def get_progress_counter(self) -> int:
        return self._progress

    async def close(self) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        if self._polling is not None:
            self._polling.cancel()
        await host.finish(CLOSE_SECONDS)


def _forward(method: str) -> Callable[..., Awaitable[Any]]:
    async def call(engine: RemoteEngine, *arguments: object) -> Any:
        return await engine._call(method, *arguments)

    return call


for forwarded in FORWARDED:
    setattr(RemoteEngine, forwarded, _forward(forwarded))


def encode(value: object) -> bytes:
    """Return a line with a pickled value."""
    return base64.b64encode(pickle.dumps(value)) + b"\n"


def decode(line: bytes | str) -> Any:
    return pickle.loads(base64.b64decode(line))


def receive_spec() -> EngineSpec:
    """Return the settings of the engine, in the server's process."""
    spec: EngineSpec = decode(os.environ[SPEC_VARIABLE])
    return spec


async def serve(engine: Engine, requests: BufferedReader, replies: BinaryIO) -> None:
    """Run the owner's calls of the engine until the owner closes its pipe. requests, replies: the pipes that
    reserve_stdin_and_stdout returns."""
    running: dict[int, asyncio.Task[None]] = {}

    async def call(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        reply: tuple[str, object]
        try:
            if method == CANCEL:
                result = None
                if task := running.get(*arguments):
                    task.cancel()
            else:
                result = getattr(engine, method)(*arguments)
                result = (await result) if isawaitable(result) else result
            reply = "", result
        except asyncio.CancelledError:
            reply = "EngineError", "the owner has cancelled this call"
        except (ValueError, EngineError) as error:
            reply = type(error).__name__, str(error)
        except Exception as error:  # noqa: BLE001  reported to the owner
            traceback.print_exception(error)
            reply = "EngineError", f"{method} failed: {type(error).__name__}: {error}"
        del running[number]
        replies.write(b"%d " % number + encode(reply))
        replies.flush()

    reader = asyncio.StreamReader(limit=MAX_REPLY)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, requests)
    while line := await reader.readline():
        number, (method, arguments) = int(line), decode(await reader.readline())
        running[number] = asyncio.create_task(call(number, method, arguments))
    await engine.close()
    sys.stdout.flush()
