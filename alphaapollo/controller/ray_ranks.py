"""Ranks as Ray actors: one process a worker, which dies with the driver and whose death is named."""

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

from alphaapollo.controller.health.stall_detector import Seen
from alphaapollo.controller.ranks import Ranks, WorkerDied, WorkerFailed, called, resolve, role_of
from alphaapollo.engines.protocol import EngineDied, EngineError
from alphaapollo.utils.heartbeat import PULSE, Report, read_process
from alphaapollo.utils.network import hold_port
from alphaapollo.utils.stack_dumps import stacks_of
from alphaapollo.utils.watchdog import die_with

W = TypeVar("W")
A = TypeVar("A")


ROOM = (
    "What makes room, nearest first: a smaller ppo_max_token_len_per_gpu, model.enable_gradient_checkpointing=true, "
    "fsdp_config.optimizer_offload=true and param_offload=true, more ranks, fsdp_config.offload_policy=true "
    "(docs/scaling.md says what takes how much; trainer.dry_run=true prints it for a run)."
)


PROCESS_DEATH_SECONDS = 3.0  # until Ray knows
NODE_DEATH_SECONDS = 45.0  # it asks each node every three seconds, and gives up after five times
HEALTH = "health"  # a lane of calls with a thread of its own: what it is asked, a worker answers while it computes
STACKS_SECONDS = 60.0


@dataclass(frozen=True)
class Seat:
    """Where one rank runs: a bundle of a placement group, and its share of it."""

    group: PlacementGroup
    bundle: int
    num_cpus: float
    num_gpus: float = 0.0


@dataclass(frozen=True)
class Driver:
    """Whom the workers work for."""

    node: str
    pid: int
    folder: str  # its working folder


def this_driver() -> Driver:
    return Driver(ray.get_runtime_context().get_node_id(), os.getpid(), os.getcwd())


@dataclass(frozen=True)
class Place:
    """Where an actor came to run."""

    pid: int
    node: str
    ip: str
    gpus: str  # comma-separated, as in CUDA_VISIBLE_DEVICES


class Host(Generic[W]):
    """The actor: holds one worker. Asynchronous, so that generate calls overlap; a synchronous call runs to its end."""

    def place(self) -> Place:
        context = ray.get_runtime_context()
        gpus = ",".join(context.get_accelerator_ids()["GPU"])
        return Place(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def meeting_point(self) -> str:
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{hold_port(host)}"

    async def start(
        self,
        factory: Callable[[], Awaitable[W] | W],
        driver: Driver,
        env: dict[str, str],
        cleanup: list[str],
    ) -> None:
        """Build the worker in the driver's folder; on the driver's own machine, die when the driver dies."""
        os.environ.update(env)
        if os.path.isdir(driver.folder):
            os.chdir(driver.folder)  # relative paths mean the same everywhere
        if ray.get_runtime_context().get_node_id() == driver.node:
            die_with(driver.pid, cleanup)
        self.worker = await resolve(factory())

    async def call(self, function: bytes) -> Any:
        """`function`: of the worker, as `packed` makes it."""
        return await resolve(ray.cloudpickle.loads(function)(self.worker))

    async def call_with(self, function: bytes, item: Any) -> Any:
        return await resolve(ray.cloudpickle.loads(function)(self.worker, item))

    @ray.method(concurrency_group=HEALTH)
    def report(self) -> Report:
        return PULSE.report()

    @ray.method(concurrency_group=HEALTH)
    def stacks(self, pids: Sequence[int]) -> str:
        return stacks_of(pids)


class PolicyHost(Host[W]):
    """Its name is what `ps` and Ray's dashboard show."""


class CriticHost(Host[W]):
    """As PolicyHost."""


class RewardModelHost(Host[W]):
    """As PolicyHost."""


class TrainerHost(Host[W]):
    """As PolicyHost, of a fine-tuning."""


class RolloutHost(Host[W]):
    """As PolicyHost."""


def packed(function: Callable[..., Any]) -> bytes:
    """A function as actors take it: pickled once for all of them, which Ray would do for each."""
    code: bytes = ray.cloudpickle.dumps(function)
    return code


class RayRanks(Ranks[W]):
    """The ranks of one role. Create, then `await start(...)` before any call."""

    def __init__(self, host: type[Host[W]], seats: Sequence[Seat]):
        self.role = role_of(host.__name__, "Host")
        self.size = len(seats)
        self.where: list[str] = []
        self.several_nodes = False
        self._places: list[Place] = []
        self._asked: dict[int, Any] = {}  # by rank, what it has not answered yet
        self._reports: dict[int, Report] = {}
        self._host, self._seats = ray.remote(concurrency_groups={HEALTH: 1})(host), list(seats)
        self.actors: list[Any] = [self._actor(seat) for seat in seats]

    def _actor(self, seat: Seat) -> Any:
        at = PlacementGroupSchedulingStrategy(seat.group, placement_group_bundle_index=seat.bundle)
        share = {"num_cpus": seat.num_cpus, "num_gpus": seat.num_gpus}
        return self._host.options(**share, max_concurrency=4096, scheduling_strategy=at).remote()

    async def places(self) -> list[Place]:
        return await self._all([actor.place.remote() for actor in self.actors])

    async def meeting_point(self) -> str:
        """Where rank 0 listens for the others."""
        return str(await self._one(0, self.actors[0].meeting_point.remote()))

    async def start(
        self,
        factories: Sequence[Callable[[], Awaitable[W] | W]],
        cleanup: list[str],
        envs: Sequence[dict[str, str]] | None = None,
    ) -> None:
        """Build the worker of each rank in its own process; `cleanup` are folders to remove when the driver dies."""
        self._places = places = await self.places()
        self.several_nodes = len({place.node for place in places}) > 1
        self.where = [self._words(place) for place in places]
        driver = this_driver()
        envs = envs or [{}] * self.size
        await self._all(
            [
                actor.start.remote(factory, driver, env, cleanup)
                for actor, factory, env in zip(self.actors, factories, envs, strict=True)
            ],
            "start",
        )

    async def replace(
        self, rank: int, factory_at: Callable[[Place], Callable[[], Awaitable[W] | W]], cleanup: list[str]
    ) -> None:
        """Another process with another worker in the seat of one that has died, or cannot do its work any more."""
        ray.kill(self.actors[rank])
        self.actors[rank] = actor = self._actor(self._seats[rank])
        self._places[rank] = place = await self._one(rank, actor.place.remote())
        self.where[rank] = self._words(place)
        await self._one(rank, actor.start.remote(factory_at(place), this_driver(), {}, cleanup), "start")

    def _words(self, place: Place) -> str:
        return f"pid {place.pid} on node {place.ip}" if self.several_nodes else f"pid {place.pid}"

    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        code = packed(function)
        return await self._all([actor.call.remote(code) for actor in self.actors], called(function))

    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        distinct = {id(item): item for item in items}  # ranks that share rows have one object
        sent = {key: self._put(item) for key, item in distinct.items()}
        code = packed(function)
        return await self._all(
            [actor.call_with.remote(code, sent[id(item)]) for actor, item in zip(self.actors, items, strict=True)],
            called(function),
        )

    def _put(self, item: Any) -> Any:
        """Into the object store; what stands for it."""
        return ray.put(item)

    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        return await self._one(rank, self.actors[rank].call.remote(packed(function)), called(function))

    async def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def ask(self) -> None:
        self._reports.clear()
        for rank, actor in enumerate(self.actors):
            if rank not in self._asked:
                self._asked[rank] = actor.report.remote()

    def answered(self) -> bool:
        if self._asked:
            ready, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
            for rank in [rank for rank, asked in self._asked.items() if asked in ready]:
                try:
                    self._reports[rank] = ray.get(self._asked.pop(rank))
                except ray.exceptions.RayError:  # its death is told by the call that waits for it
                    continue
        return not self._asked

    def seen(self) -> list[Seen]:
        here = ray.get_runtime_context().get_node_id()
        return [
            Seen(
                f"{self.role} {rank}",
                f"the {self.role} worker of rank {rank} ({self.where[rank]})",
                self._reports.get(rank),
                read_process(place.pid) if place.node == here else None,
                place.node == here,
                place.node,
                place.pid,
            )
            for rank, place in enumerate(self._places)
        ]

    def stacks(self, rank: int, pids: Sequence[int]) -> str:
        try:
            text: str = ray.get(self.actors[rank].stacks.remote(pids), timeout=STACKS_SECONDS)
        except ray.exceptions.RayError as error:  # GetTimeoutError is one
            return f"no stacks: {type(error).__name__}"
        return text

    async def _all(self, pending: list[Any], what: str = "") -> list[Any]:
        """Wait for all; the first failure ends the wait, for the others may wait for the failed rank for ever. Of a
        rank that has died the others may know first, by a connection that is closed: the death is what is told."""
        answers = await self._answers(pending, what)
        if answers is not None:
            return answers
        tasks = [asyncio.ensure_future(self._one(rank, ref, what)) for rank, ref in enumerate(pending)]
        try:
            return list(await asyncio.gather(*tasks))
        except WorkerFailed:
            await first_death(tasks, NODE_DEATH_SECONDS if self.several_nodes else PROCESS_DEATH_SECONDS)
            raise
        finally:
            for task in tasks:
                task.cancel()

    async def _answers(self, pending: list[Any], what: str) -> list[Any] | None:
        """What all return; None as soon as one fails. The loop is woken once, and not once a rank: it is a thread of
        Ray's that each answer comes to."""
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        owing = {rank: PULSE.begin(what, f"{self.role} {rank}") for rank in range(len(pending))}

        def wake() -> None:
            if not over.done():
                over.set_result(None)

        def answered(rank: int, future: Future[Any]) -> None:
            PULSE.end(owing.pop(rank))
            if (future.exception() or not owing) and not over.done():
                loop.call_soon_threadsafe(wake)

        futures = [ref.future() for ref in pending]
        try:
            for rank, future in enumerate(futures):
                future.add_done_callback(partial(answered, rank))
            if futures:
                await over
        finally:
            for key in list(owing.values()):
                PULSE.end(key)
        return None if owing or any(future.exception() for future in futures) else [one.result() for one in futures]

    async def _one(self, rank: int, pending: Any, what: str = "") -> Any:
        try:
            with PULSE.doing(what, f"{self.role} {rank}"):
                return await pending
        except ray.exceptions.RayActorError as error:
            where = f" ({self.where[rank]})" if self.where else ""
            why = str(error).strip().splitlines()[-1].partition(" Some common causes include")[0]
            raise WorkerDied(f"the {self.role} worker of rank {rank}{where} died: {why}", self.role) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ValueError):  # the user's to mend: its message says what, got, fix
                raise ValueError(str(cause)) from None
            if isinstance(cause, EngineDied):
                raise WorkerDied(f"the {self.role} worker of rank {rank} failed: {cause}", self.role) from None
            if isinstance(cause, (OSError, ArithmeticError, EngineError)):  # named and explained where it was raised
                raise WorkerFailed(f"the {self.role} worker of rank {rank} failed: {cause}") from None
            if type(cause).__name__ == "OutOfMemoryError":  # torch's; the driver may have no torch of that kind
                raise WorkerFailed(f"the {self.role} worker of rank {rank}: {cause} {ROOM}") from None
            raise WorkerFailed(f"the {self.role} worker of rank {rank} failed, which is a bug:\n{error}") from None
        except ray.exceptions.RayError as error:  # Ray's own: a node or an object is lost, memory or a disk is full
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            lost = f"the {self.role} worker of rank {rank} does not answer: {why}"
            if isinstance(error, (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError)):
                raise WorkerFailed(f"{lost} Make room there.") from None  # a restart would find it so
            raise WorkerDied(lost, self.role) from None


async def first_death(tasks: Sequence[asyncio.Future[Any]], seconds: float) -> None:
    """Raises WorkerDied if one of the ranks turns out to have died within that time."""
    waiting, end = set(tasks), time.monotonic() + seconds
    while waiting and (left := end - time.monotonic()) > 0:
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if isinstance(death := task.exception(), WorkerDied):
                raise death
