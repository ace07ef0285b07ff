"""Workers as Ray actors: each training rank and each engine has its own process, which ends with the driver."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alphaapollo.controller.errors import WorkerDied, WorkerFailed, explain_worker_error
from alphaapollo.controller.remote_ranks import RemoteRanks, WorkerHost, WorkerLocation
from alphaapollo.processes.network import reserve_port
from alphaapollo.processes.watchdog import JOB_SIGNALS, exit_when_process_ends
from alphaapollo.utils.heartbeat import Report

W = TypeVar("W")

CPU_SHARE = 0.01  # CPUs per actor in Ray's accounting; workers set their number of threads themselves
HEALTH = "health"  # concurrency group with a separate thread, so a worker answers while it computes
COLORS = re.compile(r"\x1b\[[\d;]*m")  # color codes in Ray's errors


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


class WorkerActor(WorkerHost[W]):
    """Asynchronous Ray actor that owns one worker."""

    def __init__(self, driver: WorkerLocation, working_folder: str) -> None:
        """working_folder: working directory of the driver, also used here."""
        self._driver, self._working_folder = driver, working_folder
        gc.disable()  # as in utils/imports.py, until `start` has imported the worker's modules

    def locate(self, reserves_address: bool) -> WorkerLocation:
        location = get_process_location()
        return replace(location, address=f"tcp://{location.ip}:{reserve_port(location.ip)}" if reserves_address else "")

    async def start(self, build: bytes, environment: dict[str, str]) -> None:
        """Build the worker in this process. On the driver's node, this process ends with the driver."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)  # child processes inherit what a local Ray blocks
        if os.path.isdir(self._working_folder):
            os.chdir(self._working_folder)  # relative paths mean the same everywhere
        if ray.get_runtime_context().get_node_id() == self._driver.node:
            exit_when_process_ends(self._driver.pid)
        await super().start(build, environment)
        gc.enable()

    @ray.method(concurrency_group=HEALTH)
    def report(self, with_stacks: bool) -> Report:
        return super().report(with_stacks)


class RayRanks(RemoteRanks[W]):
    """Workers of one role as Ray actors."""

    def __init__(self, role: str, slots: Sequence[ActorSlot]):
        driver = get_process_location()
        super().__init__(role, len(slots), driver.node)
        name = f"{role.title().replace(' ', '')}Actor"  # e.g. RewardModelActor, for `ps` and Ray's dashboard
        actor_class = ray.remote(concurrency_groups={HEALTH: 1})(type(name, (WorkerActor,), {}))
        self.actors: list[ray.actor.ActorHandle] = []
        for slot in slots:
            strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
            share = {"num_cpus": CPU_SHARE, "num_gpus": slot.num_gpus}
            options = actor_class.options(**share, max_concurrency=4096, scheduling_strategy=strategy)
            self.actors.append(options.remote(driver, os.getcwd()))

    def _request(self, rank: int, method: str, *arguments: object) -> Future[object]:
        call: Future[object] = getattr(self.actors[rank], method).remote(*arguments).future()
        return call

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
