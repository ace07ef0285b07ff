"""Workers as Ray actors: each training rank and each engine has its own process, which ends with the driver."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alphaapollo.controller.ranks import WorkerDied, WorkerFailed, await_if_awaitable
from alphaapollo.controller.remote_ranks import RemoteRanks, WorkerLocation, explain_worker_error
from alphaapollo.processes.network import reserve_port
from alphaapollo.processes.watchdog import JOB_SIGNALS, exit_when_process_ends
from alphaapollo.utils.heartbeat import HEARTBEAT, Report, dump_stacks

W = TypeVar("W")

NODE_DEATH_SECONDS = 45.0  # time within which Ray reports a dead node; it checks each node every few seconds
CPU_SHARE = 0.01  # CPUs per actor in Ray's accounting; workers set their number of threads themselves
HEALTH = "health"  # concurrency group with a separate thread, so a worker answers while it computes
COLORS = re.compile(r"\x1b\[[\d;]*m")  # in the errors of Ray


@dataclass(frozen=True)
class ActorSlot:
    """Where Ray places one actor: a bundle of a placement group, and the number of GPUs to reserve for the actor."""

    group: PlacementGroup
    bundle: int
    num_gpus: float = 0.0


def get_process_location() -> WorkerLocation:
    """Return the process id, the node and the GPUs of this process."""
    context = ray.get_runtime_context()
    gpus = ",".join(context.get_accelerator_ids()["GPU"])
    return WorkerLocation(os.getpid(), context.get_node_id(), ray.util.get_node_ip_address(), gpus)


class WorkerActor(Generic[W]):
    """Asynchronous Ray actor that owns one worker. Calls of async methods overlap, e.g. generate; a call of any other
    method blocks the actor until it returns."""

    def __init__(self) -> None:
        gc.disable()  # as in utils/imports.py, until `start` ends: Ray imports the modules of its arguments

    def location(self, reserves_address: bool) -> WorkerLocation:
        location = get_process_location()
        if not reserves_address:
            return location
        return replace(location, address=f"tcp://{location.ip}:{reserve_port(location.ip)}")

    async def start(
        self,
        build: Callable[[], Awaitable[W] | W],
        driver: WorkerLocation,
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
        return await await_if_awaitable(cloudpickle.loads(function)(self.worker, *arguments))

    @ray.method(concurrency_group=HEALTH)
    def report(self) -> Report:
        return HEARTBEAT.make_report()

    @ray.method(concurrency_group=HEALTH)
    def collect_stacks(self, pids: Sequence[int]) -> str:
        return dump_stacks(pids)


class RayRanks(RemoteRanks[W]):
    """Workers of one role as Ray actors."""

    transport_errors = (ray.exceptions.RayError,)

    def __init__(self, role: str, slots: Sequence[ActorSlot]):
        super().__init__(role, len(slots))
        name = f"{role.title().replace(' ', '')}Actor"  # e.g. RewardModelActor, for `ps` and Ray's dashboard
        actor_class = ray.remote(concurrency_groups={HEALTH: 1})(type(name, (WorkerActor,), {}))
        self.actors: list[ray.actor.ActorHandle] = []
        for slot in slots:
            strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
            share = {"num_cpus": CPU_SHARE, "num_gpus": slot.num_gpus}
            options = actor_class.options(**share, max_concurrency=4096, scheduling_strategy=strategy)
            self.actors.append(options.remote())

    async def locate_workers(self) -> list[WorkerLocation]:
        calls = [actor.location.remote(rank == 0) for rank, actor in enumerate(self.actors)]
        located: list[WorkerLocation] = await self._wait_for_all_calls(calls)
        if has_several_nodes := len({location.node for location in located}) > 1:
            self.death_seconds = NODE_DEATH_SECONDS
        nodes = [f" on node {location.ip}" if has_several_nodes else "" for location in located]
        self.process_names = [f"pid {one.pid}{node}" for one, node in zip(located, nodes, strict=True)]
        here = ray.get_runtime_context().get_node_id()
        self._locations = [replace(one, node="") if one.node == here else one for one in located]
        return located

    async def start(
        self, builders: Sequence[Callable[[], Awaitable[W] | W]], environment_variables: Sequence[dict[str, str]]
    ) -> None:
        context = (get_process_location(), os.getcwd())
        each = zip(self.actors, builders, environment_variables, strict=True)
        calls = [actor.start.remote(build, *context, variables) for actor, build, variables in each]
        await self._wait_for_all_calls(calls, "start")

    def send(self, rank: int, function: bytes, *arguments: object) -> ray.ObjectRef:
        return self.actors[rank].call.remote(function, *arguments)

    def _send_to_health_thread(self, rank: int, method: str, *arguments: object) -> ray.ObjectRef:
        return getattr(self.actors[rank], method).remote(*arguments)

    def _share(self, item: object) -> ray.ObjectRef:
        return ray.put(item)

    async def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def _convert_error(self, rank: int, error: BaseException) -> Exception:
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
        return explain_worker_error(worker, self.role, error.cause, COLORS.sub("", str(error)))
