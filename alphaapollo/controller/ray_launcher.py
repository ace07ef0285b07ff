"""Worker groups over Ray: one actor per worker, started concurrently and ended together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from alphaapollo.controller.health.process_monitor import monitor_processes
from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.controller.ray_cluster import (
    compare_nodes,
    find_local_ray_processes,
    find_session_logs,
    is_local_ray_silent,
)
from alphaapollo.controller.ray_placement import assign_slots, check_shared_memory, choose_visible_gpus, reserve_groups
from alphaapollo.controller.ray_ranks import RayRanks
from alphaapollo.controller.ray_transfer import RayWeightSyncClient
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs, remove_folders, start_worker
from alphaapollo.utils.watchdog import RUN, kill_run_processes
from alphaapollo.weight_sync.transport import assign_writers

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.process_group import RankPlacement

CLOSE_SECONDS = 5.0


async def launch_ray(specs: WorkerSpecs, timeout: float, paths: Mapping[str, str] | None = None) -> RayWorkerGroups:
    """Place all workers and start them concurrently.

    Args:
        paths: configuration key -> path that must exist on every node of a joined cluster; None: Ray is local.

    Raises ValueError if the workers cannot be placed, or the nodes differ. Raises TimeoutError if a role did not
    start in time; the message names it.
    """
    reserved = await reserve_groups(specs.placement, timeout)
    if paths is not None:
        await compare_nodes(reserved, paths)
    groups = RayWorkerGroups(specs, reserved)
    try:
        async with asyncio.timeout(timeout), monitor_processes(find_local_ray_processes(), lambda _: None):
            await groups.start()
    except TimeoutError:
        waiting, logs = ", ".join(sorted(groups.starting)), find_session_logs()
        await groups.close()
        raise TimeoutError(
            f"not all workers started within trainer.start_timeout={timeout:.0f} s; still starting: {waiting}. "
            f"See their logs in the run's logs/ and in {logs}. Raise trainer.start_timeout for a large model."
        ) from None
    except BaseException:
        await groups.close()
        raise
    return groups


class RayWorkerGroups(WorkerGroups):
    """Worker groups whose workers are Ray actors. `await start()` before any call."""

    def __init__(self, specs: WorkerSpecs, reserved: Sequence[PlacementGroup]):
        super().__init__(specs)
        self._reserved = list(reserved)
        self.ranks_by_role: dict[str, RayRanks[Any]] = {}
        for role in [*specs.ranks, *(["rollout"] if specs.engine else [])]:
            self.ranks_by_role[role] = RayRanks(role, assign_slots(specs.placement, role, reserved))
            self._add(role, self.ranks_by_role[role])
        self.starting = set(self.ranks_by_role)  # roles that have not started yet

    async def start(self) -> None:
        """Start all roles concurrently, because most of the time is spent on importing torch and vLLM. vLLM allocates
        its share of the GPU memory that is free when it starts. On shared GPUs, engines therefore only import their
        libraries until the trainers are built and offloaded."""
        specs, placement = self.specs, self.specs.placement
        engines = self.ranks_by_role.get("rollout")
        located = {role: await ranks.locate() for role, ranks in self.ranks_by_role.items()}
        engine_locations = located.get("rollout", [])
        rank_locations = next((locations for role, locations in located.items() if role != "rollout"), [])
        if specs.needs_shared_memory:
            check_shared_memory(rank_locations, engine_locations)
        visible = {
            role: choose_visible_gpus(placement, role, [one.gpus for one in rank_locations])
            for role in self.ranks_by_role
        }
        writers = assign_writers([one.node for one in rank_locations], [one.node for one in engine_locations])
        client = RayWeightSyncClient(engines.actors) if engines and placement.device == "cuda" else None
        starts: dict[str, Coroutine[Any, Any, None]] = {}
        for role, build in specs.ranks.items():
            placements = await self._make_rank_placements(self.ranks_by_role[role], writers)
            extra = {"client": client} if role == "policy" and client else {}
            builders = [partial(build, one, **extra) for one in placements]
            starts[role] = self.ranks_by_role[role].start(builders, specs.cleanup, visible[role])
        if engines:
            make = prepare_engine if placement.shares_gpus else start_engine
            makers = [
                partial(make, self._make_engine_builder(index, one.node)) for index, one in enumerate(engine_locations)
            ]
            starts["rollout"] = engines.start(makers, specs.cleanup, visible["rollout"])
        await self._run_starts(starts)
        if engines and placement.shares_gpus:
            await self._run_starts({"rollout": engines.call(lambda worker: worker.start())})

    def _make_engine_builder(self, index: int, node: str) -> Callable[[], RolloutWorker]:
        assert self.specs.engine
        return partial(self.specs.engine, index, node)

    async def _make_rank_placements(self, ranks: RayRanks[Any], writers: Sequence[str | None]) -> list[RankPlacement]:
        from alphaapollo.workers.process_group import RankPlacement

        placement, address = self.specs.placement, await ranks.reserve_address()
        settings = (placement.device, placement.threads, placement.sequence_parallel)
        return [RankPlacement(rank, placement.num_ranks, address, *settings, node) for rank, node in enumerate(writers)]

    async def _run_starts(self, starts: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
        self.starting = set(starts)

        async def run(role: str, start: Coroutine[Any, Any, Any]) -> None:
            await start
            self.starting.discard(role)

        tasks = [asyncio.ensure_future(run(role, start)) for role, start in starts.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    @property
    def required_processes(self) -> Mapping[str, int]:
        return find_local_ray_processes()

    async def replace_engine(self, index: int) -> None:
        await self.ranks_by_role["rollout"].replace(
            index, lambda node: partial(start_engine, self._make_engine_builder(index, node)), self.specs.cleanup
        )

    async def close(self) -> None:
        """Shut down the engines, whose cores are separate processes, then kill the actors. If this process started Ray,
        Ray ends as well. If one of Ray's processes is dead or stopped, all processes of the run are killed instead."""
        if is_local_ray_silent():  # Ray's client would wait for it
            kill_run_processes(os.environ[RUN])
        else:
            with suppress(TimeoutError, WorkerDied, WorkerFailed, ValueError):  # the actors are killed below
                if "rollout" in self.ranks_by_role:
                    await asyncio.wait_for(self.engines.close(self.specs.cleanup), timeout=CLOSE_SECONDS)
            for ranks in self.ranks_by_role.values():
                await ranks.close()
            for group in self._reserved:
                remove_placement_group(group)
        ray.shutdown()
        remove_folders(self.specs.cleanup)


async def start_engine(build: Callable[[], RolloutWorker]) -> RolloutWorker:
    """Build and start a rollout worker in this process. Returns the worker."""
    return await start_worker(build())


async def prepare_engine(build: Callable[[], RolloutWorker]) -> RolloutWorker:
    """Build a rollout worker in this process and import the libraries that its start needs. Returns the worker."""
    worker = build()
    await worker.prepare()
    return worker
