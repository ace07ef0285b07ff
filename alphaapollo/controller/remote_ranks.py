"""Calls of workers in other processes: what Ray actors (ray_ranks.py) and forked processes (process_ranks.py) share."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Generic, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from alphaapollo.controller.errors import WorkerDied, WorkerFailed
from alphaapollo.controller.ranks import Ranks, Result, await_if_awaitable, get_enclosing_method_name
from alphaapollo.engines.types import EngineDied, EngineError
from alphaapollo.utils.heartbeat import HEARTBEAT, Report, read_process

W = TypeVar("W", covariant=True)
A = TypeVar("A")
PROCESS_DEATH_SECONDS = 3.0  # time within which a dead process is reported
NODE_DEATH_SECONDS = 45.0  # the same for a dead node: Ray checks each node every few seconds
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class WorkerLocation:
    """Process, node and GPUs of a started worker or of the driver."""

    pid: int
    node: str
    ip: str
    gpus: str  # comma-separated, as in CUDA_VISIBLE_DEVICES
    address: str = ""  # of rank 0: a reserved port for the rendezvous of torch.distributed, e.g. tcp://10.0.0.1:29500


class WorkerHost(Generic[W]):
    """The worker's side of the calls: owns one worker in its process. Calls of async methods, e.g. generate, overlap. A
    call of any other method blocks everything in the process except reports until the method returns."""

    worker: W

    def locate(self, reserves_address: bool) -> WorkerLocation:
        """Return the location of this process, with an address for the rendezvous if this process reserves it."""
        raise NotImplementedError

    async def start(self, build: bytes, environment: dict[str, str]) -> None:
        """Build the worker with a pickled function. environment: environment variables to set first."""
        os.environ.update(environment)
        self.worker = await await_if_awaitable(cloudpickle.loads(build)())

    async def call(self, function: bytes, *arguments: object) -> Result:
        """Call function(worker, *arguments) and return the result. The function is pickled by `pickle_function`."""
        return await await_if_awaitable(cloudpickle.loads(function)(self.worker, *arguments))

    def report(self, with_stacks: bool) -> Report:
        """Return a report of this process's heartbeat, even while the worker computes."""
        return HEARTBEAT.make_report(with_stacks)


@lru_cache(maxsize=2)
def pickle_function(function: Callable[..., object]) -> bytes:
    """Pickle a function once, to send it to many workers. `generate_group` is sent many times and stays in the
    cache."""
    pickled: bytes = cloudpickle.dumps(function)
    return pickled


class RemoteRanks(Ranks[W]):
    """Workers of one role in other processes, one per rank. Call `locate_workers` and `start` before other methods."""

    def __init__(self, role: str, size: int, node: str = ""):
        """node: name of the driver's node."""
        self.role, self.size, self._node = role, size, node
        self.process_names: list[str] = []
        self.death_seconds = PROCESS_DEATH_SECONDS
        self._locations: list[WorkerLocation] = []

    @abstractmethod
    def _request(self, rank: int, method: str, *arguments: object) -> Future[Result]:
        """Send a call of a method of the WorkerHost of a rank."""

    async def locate_workers(self) -> list[WorkerLocation]:
        """Wait until the processes of all workers run, and return their locations."""
        calls = [self._request(rank, "locate", rank == 0) for rank in range(self.size)]
        located: list[WorkerLocation] = await self._wait_for_all_calls(calls)
        has_several_nodes = len({location.node for location in located}) > 1
        if has_several_nodes:
            self.death_seconds = NODE_DEATH_SECONDS
        nodes = [f" on node {location.ip}" if has_several_nodes else "" for location in located]
        self.process_names = [f"pid {location.pid}{node}" for location, node in zip(located, nodes, strict=True)]
        self._locations = located
        return located

    async def start(
        self, builders: Sequence[Callable[[], Awaitable[W] | W]], environment_variables: Sequence[dict[str, str]]
    ) -> None:
        """Build the worker of each rank in its process. builders: functions that return the workers, in rank order.
        environment_variables: variables to set in each process."""
        starts = enumerate(zip(builders, environment_variables, strict=True))
        calls = [
            self._request(rank, "start", cloudpickle.dumps(build), variables) for rank, (build, variables) in starts
        ]
        await self._wait_for_all_calls(calls, "start")

    def _share(self, item: object) -> object:
        """Prepare an argument that several ranks may receive."""
        return item

    @abstractmethod
    def _convert_error(self, rank: int, error: BaseException) -> Exception:
        """Convert the error of a call into the exception to raise on the driver, which names the worker."""

    async def call(self, function: Callable[[W], Result]) -> list[Result]:
        code, name = pickle_function(function), get_enclosing_method_name(function)
        return await self._wait_for_all_calls([self._request(rank, "call", code) for rank in range(self.size)], name)

    async def call_with_items(self, function: Callable[[W, A], Result], items: Sequence[A]) -> list[Result]:
        distinct = {id(item): item for item in items}  # ranks with the same rows share one object
        shared = {key: self._share(item) for key, item in distinct.items()}
        code, name = pickle_function(function), get_enclosing_method_name(function)
        calls = [self._request(rank, "call", code, shared[id(item)]) for rank, item in enumerate(items)]
        return await self._wait_for_all_calls(calls, name)

    async def call_rank(self, rank: int, function: Callable[..., Awaitable[A] | A], *arguments: object) -> A:
        code, name = pickle_function(function), get_enclosing_method_name(function)
        return await self._wait_for_call(rank, self._request(rank, "call", code, *arguments), name)

    def call_engines(self, method: str, *arguments: object) -> None:
        """Call a method of the weight transfer on all engines and wait for them. Only for ranks of rollout workers, but
        in any process. Raises EngineDied or EngineError."""
        code = cloudpickle.dumps(lambda worker: getattr(worker.engine, method)(*arguments))  # used once, so not cached
        calls = [self._request(rank, "call", code) for rank in range(self.size)]
        wait(calls, return_when=FIRST_EXCEPTION)  # the other engines would wait for a failed engine
        if error := self._find_error(calls):
            kind = EngineDied if isinstance(error, WorkerDied) else EngineError
            raise kind(f"a weight transfer failed: {error}")

    def collect_reports(self, timeout: float, with_stacks: bool = False) -> list[Report]:
        calls = [self._request(rank, "report", with_stacks) for rank in range(len(self._locations))]
        answered = wait(calls, timeout).done
        reports = []
        for rank, (call, location) in enumerate(zip(calls, self._locations, strict=True)):
            node = "" if location.node == self._node else location.node
            process = None if node else read_process(location.pid)
            report = Report(None, processes=(process,) if process else ())
            if call in answered and not call.exception():  # the call that waits for this worker raises the error
                report = call.result()
            name = f"the {self.role} worker of rank {rank} ({self.process_names[rank]})"
            reports.append(replace(report, worker=f"{self.role} {rank}", name=name, node=node))
        return reports

    async def _wait_for_call(self, rank: int, call: Future[A], call_name: str = "") -> A:
        """Wait for a call of one rank. Returns its result, or raises an error that names the worker."""
        try:
            with HEARTBEAT.record_call(call_name, f"{self.role} {rank}"):
                return await asyncio.wrap_future(call)
        except Exception as error:  # noqa: BLE001  of any connection
            raise self._convert_error(rank, error) from None

    async def _wait_for_all_calls(self, calls: Sequence[Future[A]], call_name: str = "") -> list[A]:
        """Wait for one call per rank and return their results.

        Another thread receives the results and wakes the event loop once in total, not once per rank. The first failure
        ends the wait, because the other ranks of a collective would wait forever. If one rank died and another rank
        failed first, e.g. with a closed connection, WorkerDied is raised for the dead rank."""
        loop = asyncio.get_running_loop()
        finished = loop.create_future()
        active_calls = {rank: HEARTBEAT.begin_call(call_name, f"{self.role} {rank}") for rank in range(len(calls))}

        def stop_waiting_for_results() -> None:
            if not finished.done():
                finished.set_result(None)

        def receive_result(rank: int, future: Future[A]) -> None:
            HEARTBEAT.end_call(active_calls.pop(rank))
            if (future.exception() or not active_calls) and not finished.done():
                loop.call_soon_threadsafe(stop_waiting_for_results)

        try:
            for rank, call in enumerate(calls):
                call.add_done_callback(partial(receive_result, rank))
            if calls:
                await finished
        finally:
            for key in list(active_calls.values()):
                HEARTBEAT.end_call(key)
        end = time.monotonic() + self.death_seconds
        while error := self._find_error(calls):
            if not isinstance(error, WorkerFailed) or all(call.done() for call in calls) or time.monotonic() > end:
                raise error
            await asyncio.sleep(POLL_SECONDS)
        return [call.result() for call in calls]

    def _find_error(self, calls: Sequence[Future[A]]) -> Exception | None:
        """Return the error of a rank that has died or, if there is none, of the first rank that has failed."""
        failed = {rank: call.exception() for rank, call in enumerate(calls) if call.done()}
        errors = [self._convert_error(rank, error) for rank, error in failed.items() if error]
        return next((error for error in errors if isinstance(error, WorkerDied)), errors[0] if errors else None)
