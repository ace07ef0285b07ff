"""Workers as Ray actors: each training rank and each engine has its own process, which ends with the driver."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alphaapollo.controller.ranks import (
    Ranks,
    WorkerDied,
    WorkerFailed,
    WorkerReport,
    await_if_awaitable,
    get_enclosing_method_name,
)
from alphaapollo.engines.protocol import EngineDied, EngineError
from alphaapollo.processes.network import reserve_port
from alphaapollo.processes.watchdog import JOB_SIGNALS, exit_when_process_ends
from alphaapollo.utils.heartbeat import HEARTBEAT, Report, dump_stacks, read_process

W = TypeVar("W")
A = TypeVar("A")

OUT_OF_MEMORY_HINT = (
    "To reduce memory, cheapest first: lower ppo_max_token_len_per_gpu, set model.enable_gradient_checkpointing=true, "
    "fsdp_config.optimizer_offload=true and param_offload=true, use more ranks, set fsdp_config.offload_policy=true "
    "(docs/scaling.md; trainer.dry_run=true prints the memory of a run)."
)
PROCESS_DEATH_SECONDS = 3.0  # time within which Ray reports a dead process
NODE_DEATH_SECONDS = 45.0  # time within which Ray reports a dead node; it checks each node every few seconds
CPU_SHARE = 0.01  # CPUs per actor in Ray's accounting; workers set their number of threads themselves
HEALTH = "health"  # concurrency group with a separate thread, so a worker answers while it computes
STACKS_SECONDS = 60.0  # timeout of a stack dump
POLL_SECONDS = 0.05
COLORS = re.compile(r"\x1b\[[\d;]*m")  # in the errors of Ray


@dataclass(frozen=True)
class ActorSlot:
    """Where Ray places one actor: a bundle of a placement group, and the number of GPUs to reserve for the actor."""

    group: PlacementGroup
    bundle: int
    num_gpus: float = 0.0


@dataclass(frozen=True)
class ActorLocation:
    """Process, node and GPUs of a started actor or of the driver."""

    pid: int
    node: str
    ip: str
    gpus: str  # comma-separated, as in CUDA_VISIBLE_DEVICES
    address: str = ""  # of rank 0: a reserved port for the rendezvous of torch.distributed, e.g. tcp://10.0.0.1:29500


def get_process_location() -> ActorLocation:
    """Return the process id, the node and the GPUs of this process."""
    context = ray.get_runtime_context()
    gpus = ",".join(context.get_accelerator_ids()["GPU"])
    return ActorLocation(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), gpus)


class WorkerActor(Generic[W]):
    """Asynchronous Ray actor that owns one worker. Calls of async methods overlap, e.g. generate; a call of any other
    method blocks the actor until it returns."""

    def __init__(self) -> None:
        gc.disable()  # as in utils/imports.py, until `start` ends: Ray imports the modules of its arguments

    def location(self, reserves_address: bool) -> ActorLocation:
        location = get_process_location()
        if not reserves_address:
            return location
        return replace(location, address=f"tcp://{location.ip}:{reserve_port(location.ip)}")

    async def start(
        self,
        build: Callable[[], Awaitable[W] | W],
        driver: ActorLocation,
        working_folder: str,
        environment: dict[str, str],
    ) -> None:
        """Build the worker in this process. On the driver's node, this process ends with the driver.

        build: function that returns the worker. working_folder: working directory of the driver, also used here.
        environment: environment variables to set first.
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)  # child processes inherit what a local Ray blocks
        os.environ.update(environment)
        if os.path.isdir(working_folder):
            os.chdir(working_folder)  # relative paths mean the same everywhere
        if ray.get_runtime_context().get_node_id() == driver.node:
            exit_when_process_ends(driver.pid)
        self.worker = await await_if_awaitable(build())
        gc.enable()

    async def call(self, function: bytes, *arguments: object) -> Any:
        """Call function(worker, *arguments) and return the result. The function is pickled by `pickle_function`."""
        return await await_if_awaitable(ray.cloudpickle.loads(function)(self.worker, *arguments))

    @ray.method(concurrency_group=HEALTH)
    def report(self) -> Report:
        return HEARTBEAT.make_report()

    @ray.method(concurrency_group=HEALTH)
    def collect_stacks(self, pids: Sequence[int]) -> str:
        return dump_stacks(pids)


@lru_cache(maxsize=2)
def pickle_function(function: Callable[..., object]) -> bytes:
    """Pickle a function once, to send it to many actors. `generate_group` is sent many times and stays in the cache."""
    return ray.cloudpickle.dumps(function)


class RayRanks(Ranks[W]):
    """Workers of one role as Ray actors, one per rank. Call `locate_actors` and `start` before any other method."""

    def __init__(self, role: str, slots: Sequence[ActorSlot]):
        self.role, self.size = role, len(slots)
        self.process_names: list[str] = []
        self.has_several_nodes = False
        self._locations: list[ActorLocation] = []
        name = f"{role.title().replace(' ', '')}Actor"  # e.g. RewardModelActor, for `ps` and Ray's dashboard
        actor_class = ray.remote(concurrency_groups={HEALTH: 1})(type(name, (WorkerActor,), {}))
        self.actors: list[ray.actor.ActorHandle] = []
        for slot in slots:
            strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
            share = {"num_cpus": CPU_SHARE, "num_gpus": slot.num_gpus}
            options = actor_class.options(**share, max_concurrency=4096, scheduling_strategy=strategy)
            self.actors.append(options.remote())

    async def locate_actors(self) -> list[ActorLocation]:
        """Wait until the processes of all actors run, and return their locations."""
        calls = [actor.location.remote(rank == 0) for rank, actor in enumerate(self.actors)]
        self._locations = await self._wait_for_all_calls(calls)
        self.has_several_nodes = len({location.node for location in self._locations}) > 1
        nodes = [f" on node {location.ip}" if self.has_several_nodes else "" for location in self._locations]
        self.process_names = [f"pid {one.pid}{node}" for one, node in zip(self._locations, nodes, strict=True)]
        return self._locations

    async def start(
        self, builders: Sequence[Callable[[], Awaitable[W] | W]], environment_variables: Sequence[dict[str, str]]
    ) -> None:
        """Build the worker of each rank in its process. builders: functions that return the workers, in rank order.
        environment_variables: variables to set in each process."""
        context = (get_process_location(), os.getcwd())
        each = zip(self.actors, builders, environment_variables, strict=True)
        calls = [actor.start.remote(build, *context, variables) for actor, build, variables in each]
        await self._wait_for_all_calls(calls, "start")

    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        code, name = pickle_function(function), get_enclosing_method_name(function)
        return await self._wait_for_all_calls([actor.call.remote(code) for actor in self.actors], name)

    async def call_with_items(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        distinct = {id(item): item for item in items}  # ranks with the same rows share one object
        sent = {key: self._put_in_object_store(item) for key, item in distinct.items()}
        code, name = pickle_function(function), get_enclosing_method_name(function)
        each = zip(self.actors, items, strict=True)
        return await self._wait_for_all_calls([actor.call.remote(code, sent[id(item)]) for actor, item in each], name)

    def _put_in_object_store(self, item: object) -> ray.ObjectRef:
        return ray.put(item)

    async def call_rank(self, rank: int, function: Callable[..., object], *arguments: object) -> Any:
        code, name = pickle_function(function), get_enclosing_method_name(function)
        return await self._wait_for_call(rank, self.actors[rank].call.remote(code, *arguments), name)

    async def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def collect_reports(self, timeout: float) -> list[WorkerReport]:
        here, calls = ray.get_runtime_context().get_node_id(), [actor.report.remote() for actor in self.actors]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout)
        reports = []
        for rank, (call, location) in enumerate(zip(calls, self._locations, strict=False)):  # none yet at the start
            node = "" if location.node == here else location.node
            process = None if node else read_process(location.pid)
            report = Report(None, processes=(process,) if process else ())
            if call in answered:
                with suppress(ray.exceptions.RayError):  # the call that waits for this worker raises the error
                    report = ray.get(call)
            name = f"the {self.role} worker of rank {rank} ({self.process_names[rank]})"
            reports.append(WorkerReport(f"{self.role} {rank}", name, location.pid, report, node))
        return reports

    def collect_stacks(self, rank: int, pids: Sequence[int]) -> str:
        try:
            return ray.get(self.actors[rank].collect_stacks.remote(pids), timeout=STACKS_SECONDS)
        except ray.exceptions.RayError as error:  # includes GetTimeoutError
            return f"no stacks: {type(error).__name__}"

    async def _wait_for_call(self, rank: int, call: ray.ObjectRef, call_name: str = "") -> Any:
        """Wait for a remote call on one rank. Returns its result, or raises an error that names the worker."""
        try:
            with HEARTBEAT.record_call(call_name, f"{self.role} {rank}"):
                return await call
        except ray.exceptions.RayError as error:
            raise self._convert_error(rank, error) from None

    async def _wait_for_all_calls(self, calls: list[ray.ObjectRef], call_name: str = "") -> list[Any]:
        """Wait for one remote call per rank (Ray references) and return their results.

        A Ray thread receives the results and wakes the event loop once in total, not once per rank. The first failure
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

        futures = [ref.future() for ref in calls]
        try:
            for rank, future in enumerate(futures):
                future.add_done_callback(partial(receive_result, rank))
            if futures:
                await over
        finally:
            for key in list(missing.values()):
                HEARTBEAT.end_call(key)
        end = time.monotonic() + (NODE_DEATH_SECONDS if self.has_several_nodes else PROCESS_DEATH_SECONDS)
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

    def _convert_error(self, rank: int, error: BaseException) -> Exception:
        """Convert the error of a remote call into the exception to raise on the driver, which names the worker."""
        worker = f"the {self.role} worker of rank {rank}"
        if isinstance(error, ray.exceptions.RayActorError):
            where = f" ({self.process_names[rank]})" if self.process_names else ""
            reason = str(error).strip().splitlines()[-1].partition(" Some common causes include")[0]
            return WorkerDied(f"{worker}{where} died: {reason}", self.role)
        if not isinstance(error, ray.exceptions.RayTaskError):  # Ray lost a node or an object, or memory is full
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            message = f"{worker} does not answer: {reason}"
            if isinstance(error, (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError)):
                hint = "Free memory or disk space on the worker's node."  # a restart cannot help
                return WorkerFailed(f"{message.rstrip('.')}. {hint}")
            return WorkerDied(message, self.role)
        cause = error.cause
        if isinstance(cause, ValueError):  # invalid input; the message has the fix
            return ValueError(str(cause))
        if isinstance(cause, EngineDied):
            return WorkerDied(f"{worker} failed: {cause}", self.role)
        if isinstance(cause, (OSError, ArithmeticError, EngineError)):  # expected errors; the message explains them
            return WorkerFailed(f"{worker} failed: {cause}")
        if type(cause).__name__ == "OutOfMemoryError":  # by name, because the driver's torch may not have this class
            return WorkerFailed(f"{worker}: {cause} {OUT_OF_MEMORY_HINT}")
        return WorkerFailed(f"{worker} failed, which is a bug:\n{COLORS.sub('', str(error))}")
