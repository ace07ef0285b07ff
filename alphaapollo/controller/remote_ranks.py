"""Calls of workers in other processes: what Ray actors (ray_ranks.py) and forked processes (process_ranks.py) share."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from alphaapollo.controller.ranks import Ranks, WorkerDied, WorkerFailed, WorkerReport, get_enclosing_method_name
from alphaapollo.engines.protocol import EngineDied, EngineError
from alphaapollo.utils.heartbeat import HEARTBEAT, Report, read_process

W = TypeVar("W")
A = TypeVar("A")

OUT_OF_MEMORY_HINT = (
    "To reduce memory, cheapest first: lower ppo_max_token_len_per_gpu, set model.enable_gradient_checkpointing=true, "
    "fsdp_config.optimizer_offload=true and param_offload=true, use more ranks, set fsdp_config.offload_policy=true "
    "(docs/scaling.md; trainer.dry_run=true prints the memory of a run)."
)
PROCESS_DEATH_SECONDS = 3.0  # time within which a dead process is reported
STACKS_SECONDS = 60.0  # timeout of a stack dump
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class WorkerLocation:
    """Process, node and GPUs of a started worker or of the driver."""

    pid: int
    node: str
    ip: str
    gpus: str  # comma-separated, as in CUDA_VISIBLE_DEVICES
    address: str = ""  # of rank 0: a reserved port for the rendezvous of torch.distributed, e.g. tcp://10.0.0.1:29500


class RemoteCall(Protocol):
    """Call of one worker that has been sent. It is awaitable more than once."""

    def future(self) -> Future[Any]: ...

    def __await__(self) -> Any: ...


@lru_cache(maxsize=2)
def pickle_function(function: Callable[..., object]) -> bytes:
    """Pickle a function once, to send it to many workers. `generate_group` is sent many times and stays in the
    cache."""
    pickled: bytes = cloudpickle.dumps(function)
    return pickled


class RemoteRanks(Ranks[W]):
    """Workers of one role in other processes, one per rank. Call `locate_workers` and `start` before other methods."""

    transport_errors: ClassVar[tuple[type[Exception], ...]]
    """Errors of a call that come from the connection to the worker."""

    def __init__(self, role: str, size: int):
        self.role, self.size = role, size
        self.process_names: list[str] = []
        self.death_seconds = PROCESS_DEATH_SECONDS
        self._locations: list[WorkerLocation] = []

    @abstractmethod
    async def locate_workers(self) -> list[WorkerLocation]:
        """Wait until the processes of all workers run, and return their locations."""

    @abstractmethod
    async def start(
        self, builders: Sequence[Callable[[], Awaitable[W] | W]], environment_variables: Sequence[dict[str, str]]
    ) -> None:
        """Build the worker of each rank in its process. builders: functions that return the workers, in rank order.
        environment_variables: variables to set in each process."""

    @abstractmethod
    def send(self, rank: int, function: bytes, *arguments: object) -> RemoteCall:
        """Send a call of `function`, pickled by `pickle_function`, with the worker and `arguments`."""

    @abstractmethod
    def _send_to_health_thread(self, rank: int, method: str, *arguments: object) -> RemoteCall:
        """Send a call of `report` or `collect_stacks`, which the worker answers even while it computes."""

    def _share(self, item: object) -> object:
        """Prepare an argument that several ranks may receive."""
        return item

    @abstractmethod
    def _convert_error(self, rank: int, error: BaseException) -> Exception:
        """Convert the error of a call into the exception to raise on the driver, which names the worker."""

    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        code, name = pickle_function(function), get_enclosing_method_name(function)
        return await self._wait_for_all_calls([self.send(rank, code) for rank in range(self.size)], name)

    async def call_with_items(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        distinct = {id(item): item for item in items}  # ranks with the same rows share one object
        shared = {key: self._share(item) for key, item in distinct.items()}
        code, name = pickle_function(function), get_enclosing_method_name(function)
        calls = [self.send(rank, code, shared[id(item)]) for rank, item in enumerate(items)]
        return await self._wait_for_all_calls(calls, name)

    async def call_rank(self, rank: int, function: Callable[..., object], *arguments: object) -> Any:
        code, name = pickle_function(function), get_enclosing_method_name(function)
        return await self._wait_for_call(rank, self.send(rank, code, *arguments), name)

    def collect_reports(self, timeout: float) -> list[WorkerReport]:
        calls = [self._send_to_health_thread(rank, "report").future() for rank in range(len(self._locations))]
        answered = wait(calls, timeout).done
        reports = []
        for rank, (call, location) in enumerate(zip(calls, self._locations, strict=True)):
            process = None if location.node else read_process(location.pid)
            report = Report(None, processes=(process,) if process else ())
            if call in answered:
                with suppress(*self.transport_errors):  # the call that waits for this worker raises the error
                    report = call.result()
            name = f"the {self.role} worker of rank {rank} ({self.process_names[rank]})"
            reports.append(WorkerReport(f"{self.role} {rank}", name, location.pid, report, location.node))
        return reports

    def collect_stacks(self, rank: int, pids: Sequence[int]) -> str:
        call = self._send_to_health_thread(rank, "collect_stacks", pids).future()
        if call not in wait([call], STACKS_SECONDS).done:
            return f"no stacks within {STACKS_SECONDS:.0f} s"
        error = call.exception()
        return f"no stacks: {type(error).__name__}" if error else str(call.result())

    async def _wait_for_call(self, rank: int, call: RemoteCall, call_name: str = "") -> Any:
        """Wait for a call of one rank. Returns its result, or raises an error that names the worker."""
        try:
            with HEARTBEAT.record_call(call_name, f"{self.role} {rank}"):
                return await call
        except self.transport_errors as error:
            raise self._convert_error(rank, error) from None

    async def _wait_for_all_calls(self, calls: Sequence[RemoteCall], call_name: str = "") -> list[Any]:
        """Wait for one call per rank and return their results.

        Another thread receives the results and wakes the event loop once in total, not once per rank. The first failure
        ends the wait, because the other ranks of a collective would wait forever. If one rank died and another rank
        failed first, e.g. with a closed connection, WorkerDied is raised for the dead rank.
        """
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        missing = {rank: HEARTBEAT.begin_call(call_name, f"{self.role} {rank}") for rank in range(len(calls))}

        def stop_waiting_for_results() -> None:
            if not over.done():
                over.set_result(None)

        def receive_result(rank: int, future: Future[Any]) -> None:
            HEARTBEAT.end_call(missing.pop(rank))
            if (future.exception() or not missing) and not over.done():
                loop.call_soon_threadsafe(stop_waiting_for_results)

        futures = [call.future() for call in calls]
        try:
            for rank, future in enumerate(futures):
                future.add_done_callback(partial(receive_result, rank))
            if futures:
                await over
        finally:
            for key in list(missing.values()):
                HEARTBEAT.end_call(key)
        end = time.monotonic() + self.death_seconds
        while error := self._find_error(futures):
            if (
                not isinstance(error, WorkerFailed)
                or all(future.done() for future in futures)
                or time.monotonic() > end
            ):
                raise error
            await asyncio.sleep(POLL_SECONDS)
        return [future.result() for future in futures]

    def _find_error(self, futures: Sequence[Future[Any]]) -> Exception | None:
        """Return the error of a rank that has died or, if there is none, of the first rank that has failed."""
        failed = {rank: future.exception() for rank, future in enumerate(futures) if future.done()}
        errors = [self._convert_error(rank, error) for rank, error in failed.items() if error]
        return next((error for error in errors if isinstance(error, WorkerDied)), errors[0] if errors else None)


def explain_worker_error(worker: str, role: str, cause: BaseException, trace: str) -> Exception:
    """Return the exception to raise on the driver for an exception of a worker. worker: name of the worker, e.g. `the
    policy worker of rank 1`. trace: the traceback, shown for bugs."""
    if isinstance(cause, ValueError):  # invalid input; the message has the fix
        return ValueError(str(cause))
    if isinstance(cause, EngineDied):
        return WorkerDied(f"{worker} failed: {cause}", role)
    if isinstance(cause, (OSError, ArithmeticError, EngineError)):  # expected errors; the message explains them
        return WorkerFailed(f"{worker} failed: {cause}")
    if type(cause).__name__ == "OutOfMemoryError":  # by name, because the driver's torch may not have this class
        return WorkerFailed(f"{worker}: {cause} {OUT_OF_MEMORY_HINT}")
    return WorkerFailed(f"{worker} failed, which is a bug:\n{trace}")
