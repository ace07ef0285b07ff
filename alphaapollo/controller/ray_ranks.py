"""Ranks as Ray actors. Each worker has its own process, which ends with the driver."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alphaapollo.controller.health.stall_detector import WorkerSnapshot
from alphaapollo.controller.ranks import Ranks, WorkerDied, WorkerFailed, await_if_needed, get_method_name
from alphaapollo.engines.protocol import EngineDied, EngineError
from alphaapollo.utils.heartbeat import HEARTBEAT, ProcessReport, read_process
from alphaapollo.utils.network import reserve_port
from alphaapollo.utils.stack_dumps import dump_stacks
from alphaapollo.utils.watchdog import exit_with_process

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


@dataclass(frozen=True)
class ActorSlot:
    """Slot in which Ray places one actor: a bundle of a placement group, and the number of its GPUs for the actor."""

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


def get_location() -> ActorLocation:
    """Return the location of this process."""
    context = ray.get_runtime_context()
    gpus = ",".join(context.get_accelerator_ids()["GPU"])
    return ActorLocation(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), gpus)


class WorkerActor(Generic[W]):
    """Actor that owns one worker. It is asynchronous, so generate calls overlap; a call without `await` blocks all
    others until it ends."""

    def location(self) -> ActorLocation:
        return get_location()

    def reserve_address(self) -> str:
        """Reserve a port on this node and return its address for torch.distributed."""
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{reserve_port(host)}"

    async def start(
        self,
        factory: Callable[[], Awaitable[W] | W],
        driver: ActorLocation,
        folder: str,
        env: dict[str, str],
        cleanup: list[str],
    ) -> None:
        """Build the worker in the driver's working directory. On the driver's node, this process ends with the driver.

        folder: working directory of the driver. cleanup: folders to remove when the driver dies.
        """
        os.environ.update(env)
        if os.path.isdir(folder):
            os.chdir(folder)  # relative paths mean the same everywhere
        if ray.get_runtime_context().get_node_id() == driver.node:
            exit_with_process(driver.pid, cleanup)
        self.worker = await await_if_needed(factory())

    async def call(self, function: bytes, *item: Any) -> Any:
        """Call function(worker, *item) and return the result. function: pickled by `pickle_function`."""
        return await await_if_needed(ray.cloudpickle.loads(function)(self.worker, *item))

    @ray.method(concurrency_group=HEALTH)
    def report(self) -> ProcessReport:
        return HEARTBEAT.report()

    @ray.method(concurrency_group=HEALTH)
    def collect_stacks(self, pids: Sequence[int]) -> str:
        return dump_stacks(pids)


def make_actor_class(role: str) -> type[WorkerActor[Any]]:
    """Create a WorkerActor class named after the role, e.g. RewardModelActor, for `ps` and Ray's dashboard."""
    return type(f"{role.title().replace(' ', '')}Actor", (WorkerActor,), {})


def pickle_function(function: Callable[..., Any]) -> bytes:
    """Pickle a function once for all actors. Ray would pickle it once per actor."""
    code: bytes = ray.cloudpickle.dumps(function)
    return code


class RayRanks(Ranks[W]):
    """Ranks of one role as Ray actors. `await start(...)` before any call."""

    def __init__(self, role: str, slots: Sequence[ActorSlot]):
        self.role = role
        self.size = len(slots)
        self.process_names: list[str] = []
        self.has_several_nodes = False
        self._locations: list[ActorLocation] = []
        self._pending_reports: dict[int, Any] = {}  # rank -> reference to a requested report
        self._reports: dict[int, ProcessReport] = {}
        self._actor_class, self._slots = ray.remote(concurrency_groups={HEALTH: 1})(make_actor_class(role)), list(slots)
        self.actors: list[Any] = [self._make_actor(slot) for slot in slots]

    def _make_actor(self, slot: ActorSlot) -> Any:
        strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
        share = {"num_cpus": CPU_SHARE, "num_gpus": slot.num_gpus}
        return self._actor_class.options(**share, max_concurrency=4096, scheduling_strategy=strategy).remote()

    async def locate(self) -> list[ActorLocation]:
        """Wait until the actors' processes run, and return their locations."""
        self._locations = await self._wait_for_all([actor.location.remote() for actor in self.actors])
        self.has_several_nodes = len({location.node for location in self._locations}) > 1
        self.process_names = [self._describe(location) for location in self._locations]
        return self._locations

    async def reserve_address(self) -> str:
        """Reserve and return the address at which rank 0 waits for all ranks to connect."""
        return str(await self._wait_for_one(0, self.actors[0].reserve_address.remote()))

    async def start(
        self, factories: Sequence[Callable[[], Awaitable[W] | W]], cleanup: list[str], envs: Sequence[dict[str, str]]
    ) -> None:
        """Build the worker of each rank in its process.

        Args:
            factories: build the workers, in rank order.
            cleanup: folders to remove when the driver dies.
            envs: environment variables to set in each process.
        """
        each = enumerate(zip(factories, envs, strict=True))
        await self._wait_for_all([self._start(rank, factory, cleanup, env) for rank, (factory, env) in each], "start")

    async def replace(
        self, rank: int, factory_at: Callable[[str], Callable[[], Awaitable[W] | W]], cleanup: list[str]
    ) -> None:
        """Start a new process and worker in the slot of a dead worker. factory_at: returns the factory for a node."""
        ray.kill(self.actors[rank])
        self.actors[rank] = actor = self._make_actor(self._slots[rank])
        self._locations[rank] = location = await self._wait_for_one(rank, actor.location.remote())
        self.process_names[rank] = self._describe(location)
        await self._wait_for_one(rank, self._start(rank, factory_at(location.node), cleanup, {}), "start")

    def _start(self, rank: int, factory: Callable[[], Any], cleanup: list[str], env: dict[str, str]) -> Any:
        return self.actors[rank].start.remote(factory, get_location(), os.getcwd(), env, cleanup)

    def _describe(self, location: ActorLocation) -> str:
        return f"pid {location.pid} on node {location.ip}" if self.has_several_nodes else f"pid {location.pid}"

    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        code = pickle_function(function)
        return await self._wait_for_all([actor.call.remote(code) for actor in self.actors], get_method_name(function))

    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        distinct = {id(item): item for item in items}  # ranks with the same rows share one object
        sent = {key: self._put(item) for key, item in distinct.items()}
        code = pickle_function(function)
        return await self._wait_for_all(
            [actor.call.remote(code, sent[id(item)]) for actor, item in zip(self.actors, items, strict=True)],
            get_method_name(function),
        )

    def _put(self, item: Any) -> Any:
        """Put an item into the object store and return its reference."""
        return ray.put(item)

    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        return await self._wait_for_one(
            rank, self.actors[rank].call.remote(pickle_function(function)), get_method_name(function)
        )

    async def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def request_reports(self) -> None:
        self._reports.clear()
        for rank, actor in enumerate(self.actors):
            if rank not in self._pending_reports:
                self._pending_reports[rank] = actor.report.remote()

    def have_reported(self) -> bool:
        if self._pending_reports:
            ready, _ = ray.wait(list(self._pending_reports.values()), num_returns=len(self._pending_reports), timeout=0)
            for rank in [rank for rank, reference in self._pending_reports.items() if reference in ready]:
                try:
                    self._reports[rank] = ray.get(self._pending_reports.pop(rank))
                except ray.exceptions.RayError:  # the call that waits for this worker raises the error
                    continue
        return not self._pending_reports

    def take_snapshots(self) -> list[WorkerSnapshot]:
        here = ray.get_runtime_context().get_node_id()
        return [
            WorkerSnapshot(
                f"{self.role} {rank}",
                f"the {self.role} worker of rank {rank} ({self.process_names[rank]})",
                self._reports.get(rank),
                read_process(location.pid) if location.node == here else None,
                location.node == here,
                location.node,
                location.pid,
            )
            for rank, location in enumerate(self._locations)
        ]

    def collect_stacks(self, rank: int, pids: Sequence[int]) -> str:
        try:
            text: str = ray.get(self.actors[rank].collect_stacks.remote(pids), timeout=STACKS_SECONDS)
        except ray.exceptions.RayError as error:  # includes GetTimeoutError
            return f"no stacks: {type(error).__name__}"
        return text

    async def _wait_for_all(self, pending: list[Any], call_name: str = "") -> list[Any]:
        """Wait for the calls on all ranks and return their results. The first failure ends the wait, because all other
        ranks may wait forever for the failed rank. When a rank dies, other ranks may fail earlier with a closed
        connection. In this case WorkerDied is raised for the dead rank."""
        results = await self._wait_for_results(pending, call_name)
        if results is not None:
            return results
        tasks = [asyncio.ensure_future(self._wait_for_one(rank, ref, call_name)) for rank, ref in enumerate(pending)]
        try:
            return list(await asyncio.gather(*tasks))
        except WorkerFailed:
            await raise_first_death(tasks, NODE_DEATH_SECONDS if self.has_several_nodes else PROCESS_DEATH_SECONDS)
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _wait_for_results(self, pending: list[Any], call_name: str) -> list[Any] | None:
        """Return all results, or None as soon as one call fails. Results arrive in a Ray thread, which wakes the event
        loop once instead of once per rank."""
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        missing = {rank: HEARTBEAT.begin(call_name, f"{self.role} {rank}") for rank in range(len(pending))}

        def wake() -> None:
            if not over.done():
                over.set_result(None)

        def receive(rank: int, future: Future[Any]) -> None:
            HEARTBEAT.end(missing.pop(rank))
            if (future.exception() or not missing) and not over.done():
                loop.call_soon_threadsafe(wake)

        futures = [ref.future() for ref in pending]
        try:
            for rank, future in enumerate(futures):
                future.add_done_callback(partial(receive, rank))
            if futures:
                await over
        finally:
            for key in list(missing.values()):
                HEARTBEAT.end(key)
        return None if missing or any(future.exception() for future in futures) else [one.result() for one in futures]

    async def _wait_for_one(self, rank: int, pending: Any, call_name: str = "") -> Any:
        """Wait for a call on one rank. Returns its result, or raises an error that names the worker."""
        worker = f"the {self.role} worker of rank {rank}"
        try:
            with HEARTBEAT.call(call_name, f"{self.role} {rank}"):
                return await pending
        except ray.exceptions.RayActorError as error:
            where = f" ({self.process_names[rank]})" if self.process_names else ""
            reason = str(error).strip().splitlines()[-1].partition(" Some common causes include")[0]
            raise WorkerDied(f"{worker}{where} died: {reason}", self.role) from None
        except ray.exceptions.RayTaskError as error:
            raise self._convert_error(worker, error) from None
        except ray.exceptions.RayError as error:  # Ray lost a node or an object, or memory or a disk is full
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            message = f"{worker} does not answer: {reason}"
            if isinstance(error, (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError)):
                raise WorkerFailed(
                    f"{message} Free memory or disk space on its node."
                ) from None  # a restart cannot help
            raise WorkerDied(message, self.role) from None

    def _convert_error(self, worker: str, error: Any) -> Exception:
        """Return the exception to raise on the driver for an error that a worker raised."""
        cause = error.cause
        if isinstance(cause, ValueError):  # invalid input; the message has the fix
            return ValueError(str(cause))
        if isinstance(cause, EngineDied):
            return WorkerDied(f"{worker} failed: {cause}", self.role)
        if isinstance(cause, (OSError, ArithmeticError, EngineError)):  # expected errors; the message explains them
            return WorkerFailed(f"{worker} failed: {cause}")
        if type(cause).__name__ == "OutOfMemoryError":  # by name, because the driver's torch may not have this class
            return WorkerFailed(f"{worker}: {cause} {OUT_OF_MEMORY_HINT}")
        return WorkerFailed(f"{worker} failed, which is a bug:\n{error}")


async def raise_first_death(tasks: Sequence[asyncio.Future[Any]], seconds: float) -> None:
    """Raise WorkerDied if a task fails with it within `seconds`. tasks: calls on the ranks."""
    waiting, end = set(tasks), time.monotonic() + seconds
    while waiting and (left := end - time.monotonic()) > 0:
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if isinstance(death := task.exception(), WorkerDied):
                raise death
