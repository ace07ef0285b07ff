"""Worker groups over Ray: one actor per worker, started concurrently and ended together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from alphaapollo.controller.health.process_monitor import monitor_processes
from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.controller.ray_cluster import (
    check_nodes_match_driver,
    find_local_ray_processes,
    is_local_ray_unresponsive,
)
from alphaapollo.controller.ray_placement import assign_actor_slots, choose_visible_gpus, reserve_placement_groups
from alphaapollo.controller.ray_ranks import RayRanks
from alphaapollo.controller.ray_transfer import RayFileReader, RayWeightSyncClient
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs, start_rollout_worker
from alphaapollo.utils.watchdog import RUN, kill_run_processes, remove_paths
from alphaapollo.weight_sync.transport import assign_weight_writers

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.process_group import RankPlacement

CLOSE_SECONDS = 5.0


async def launch_ray_workers(
    specs: WorkerSpecs, start_timeout: float, required_paths: Mapping[str, str] | None = None
) -> RayWorkerGroups:
    """Reserve resources for all workers in Ray and start them concurrently. Arguments and errors are those of
    launcher.launch_workers, but required_paths may be None if Ray runs only on this machine."""
    reserved = await reserve_placement_groups(specs.placement, start_timeout)
    if required_paths is not None:
        await check_nodes_match_driver(reserved, required_paths)
    groups = RayWorkerGroups(specs, reserved)
    try:
        async with asyncio.timeout(start_timeout), monitor_processes(groups.required_service_processes, lambda _: None):
            await groups.start()
    except TimeoutError:
        waiting = ", ".join(sorted(groups.starting))
        logs = ray._private.worker._global_node.get_logs_dir_path()  # of Ray on this machine
        await groups.close()
        raise TimeoutError(
            f"not all workers started within trainer.start_timeout={start_timeout:.0f} s; still starting: {waiting}. "
            f"See their logs in the run's logs/ and in {logs}. Raise trainer.start_timeout for a large model."
        ) from None
    except BaseException:
        await groups.close()
        raise
    return groups


class RayWorkerGroups(WorkerGroups):
    """Worker groups whose workers are Ray actors. Call `start` before any other method."""

    def __init__(self, specs: WorkerSpecs, reserved: Sequence[PlacementGroup]):
        super().__init__(specs)
        self._reserved = list(reserved)
        self.required_service_processes = find_local_ray_processes()
        self.ranks_by_role: dict[str, RayRanks[Any]] = {}
        for role in [*specs.rank_builders, *(["rollout"] if specs.engine_builder else [])]:
            slots = assign_actor_slots(specs.placement, role, reserved)
            self.ranks_by_role[role] = RayRanks(role, slots, specs.cleanup_folders)
            self._add_group(role, self.ranks_by_role[role])
        self.starting = set(self.ranks_by_role)  # roles that have not started yet
        self._rank_nodes: list[str] = []  # node of each training rank

    async def start(self) -> None:
        """Start the workers of all roles concurrently, because most of the time is spent on importing torch and vLLM.

        vLLM allocates its share of the GPU memory that is free when it starts. On shared GPUs, engines therefore only
        import their libraries until the trainers are built and offloaded.
        """
        specs, placement = self.specs, self.specs.placement
        engines = self.ranks_by_role.get("rollout")
        located = {role: await ranks.locate_actors() for role, ranks in self.ranks_by_role.items()}
        engine_locations = located.get("rollout", [])
        rank_locations = next((locations for role, locations in located.items() if role != "rollout"), [])
        visible = {
            role: choose_visible_gpus(placement, role, [one.gpus for one in rank_locations])
            for role in self.ranks_by_role
        }
        self._rank_nodes = [one.node for one in rank_locations]
        writers = assign_weight_writers(self._rank_nodes, [one.node for one in engine_locations])
        client = RayWeightSyncClient(engines.actors) if engines and placement.device == "cuda" else None
        starts: dict[str, Coroutine[object, object, None]] = {}
        for role, build in specs.rank_builders.items():
            placements = await self._make_rank_placements(self.ranks_by_role[role], writers)
            extra = {"client": client} if role == "policy" and client else {}
            builders = [partial(build, one, **extra) for one in placements]
            starts[role] = self.ranks_by_role[role].start(builders, visible[role])
        if engines:
            makers = [
                partial(start_rollout_worker, self._make_engine_builder(index, one.node), placement.shares_gpus)
                for index, one in enumerate(engine_locations)
            ]
            starts["rollout"] = engines.start(makers, visible["rollout"])
        await self._await_role_starts(starts)
        if engines and placement.shares_gpus:
            await self._await_role_starts({"rollout": engines.call(lambda worker: worker.start())})

    async def _make_rank_placements(
        self, ranks: RayRanks[Any], weight_sync_nodes: Sequence[str | None]
    ) -> list[RankPlacement]:
        """Return the settings of each training rank. weight_sync_nodes[r]: node to which rank r writes weights."""
        from alphaapollo.workers.process_group import RankPlacement

        placement, address = self.specs.placement, await ranks.reserve_address()
        sizes = (placement.device, placement.threads, placement.sequence_parallel)
        ranks_and_nodes = enumerate(weight_sync_nodes)
        return [RankPlacement(rank, placement.num_ranks, address, *sizes, node) for rank, node in ranks_and_nodes]

    async def _await_role_starts(self, starts: Mapping[str, Coroutine[object, object, object]]) -> None:
        self.starting = set(starts)

        async def await_start(role: str, start: Coroutine[object, object, object]) -> None:
            await start
            self.starting.discard(role)

        tasks = [asyncio.ensure_future(await_start(role, start)) for role, start in starts.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _make_engine_builder(self, index: int, node: str) -> Callable[..., RolloutWorker]:
        build = super()._make_engine_builder(index, node)
        has_rank = not self._rank_nodes or node in self._rank_nodes
        return build if has_rank else partial(build, RayFileReader(self.ranks_by_role["policy"].actors[0]))

    async def replace_engine(self, index: int) -> None:
        await self.ranks_by_role["rollout"].replace(
            index, lambda node: partial(start_rollout_worker, self._make_engine_builder(index, node))
        )

    async def close(self) -> None:
        """Shut down the engines, kill the actors, and end Ray if this process started it. If Ray does not respond,
        kill all processes of the run instead."""
        if is_local_ray_unresponsive():  # Ray's client would wait for it
            kill_run_processes(os.environ[RUN])
        else:
            with suppress(TimeoutError, WorkerDied, WorkerFailed, ValueError):  # the actors are killed below
                if "rollout" in self.ranks_by_role:
                    await asyncio.wait_for(self.engines.close(self.specs.cleanup_folders), timeout=CLOSE_SECONDS)
            for ranks in self.ranks_by_role.values():
                await ranks.close()
            for group in self._reserved:
                remove_placement_group(group)
        ray.shutdown()
        remove_paths(map(Path, self.specs.cleanup_folders))
