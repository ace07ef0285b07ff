"""Worker groups over Ray: one actor per worker, and their weight transfers.

The first placement group has one bundle per training node, with its training GPUs, and one per node for engines.
Engines with their own GPUs on the training nodes have a second placement group with one bundle per engine. Ray assigns
the training GPUs to the policy's actors. All other actors on these GPUs reserve none in Ray: CUDA_VISIBLE_DEVICES
selects their GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_cluster import (
    check_nodes_match_driver,
    find_local_ray_processes,
    is_local_ray_unresponsive,
)
from alphaapollo.controller.ray_ranks import CPU_SHARE, ActorSlot, RayRanks
from alphaapollo.controller.remote_groups import RemoteWorkerGroups
from alphaapollo.controller.remote_ranks import pickle_function
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.processes.watchdog import RUN, kill_run_processes, remove_paths

if TYPE_CHECKING:
    from alphaapollo.engines.weight_sync.changes import SentFiles, WeightReader

GPU_ROLES = ("policy", "trainer")  # roles whose actors own the training GPUs
GRANT_SECONDS = 60.0  # maximum wait for a placement group


async def reserve_placement_groups(placement: Placement, timeout: float) -> list[PlacementGroup]:
    """Reserve a placement group for the training ranks, and another one for engines with their own GPUs. Raises
    ValueError if Ray does not reserve them within GRANT_SECONDS, or within `timeout` if it is shorter."""
    group_specs: list[tuple[str, list[dict[str, float]]]] = []  # strategy and bundles of each group
    on_gpu = placement.device == "cuda"
    if placement.num_ranks:
        counts = [placement.ranks_per_node] * placement.num_nodes
        counts += [placement.gpus_per_engine_node] * placement.engine_nodes
        nodes = [{"CPU": 1.0} | ({"GPU": float(count)} if on_gpu else {}) for count in counts]
        group_specs.append(("STRICT_SPREAD" if len(nodes) > 1 else "PACK", nodes))
    if _needs_engine_placement_group(placement):
        engine = {"CPU": 1.0 if placement.num_ranks else CPU_SHARE}
        engine |= {"GPU": float(placement.tensor_parallel)} if on_gpu else {}
        group_specs.append(("PACK" if placement.num_ranks else "SPREAD", [engine] * placement.num_engines))
    groups = [placement_group(bundles, strategy=strategy) for strategy, bundles in group_specs]
    for group, (_, bundles) in zip(groups, group_specs, strict=True):
        ready, _ = await asyncio.to_thread(ray.wait, [group.ready()], timeout=min(timeout, GRANT_SECONDS))
        if not ready:
            total, free = (
                {name: resources[name] for name in ("CPU", "GPU") if name in resources}
                for resources in (ray.cluster_resources(), ray.available_resources())
            )
            ray.shutdown()
            raise ValueError(
                f"this run needs the resources {bundles} (one entry per node or engine). Of the cluster's {total}, "
                f"only {free} are free. Wait for other jobs to end, start more nodes, or lower trainer.nnodes, "
                "trainer.n_gpus_per_node or rollout.num_engines."
            )
    return groups


def _needs_engine_placement_group(placement: Placement) -> bool:
    has_own_gpus = placement.device == "cuda" and not placement.colocate and not placement.engine_nodes
    return placement.num_engines > 0 and (not placement.num_ranks or has_own_gpus)


def assign_actor_slots(placement: Placement, role: str, reserved: Sequence[PlacementGroup]) -> list[ActorSlot]:
    """Return where to place each actor of a role, in rank order, within the reserved placement groups. An engine on
    shared GPUs runs on the node of its first GPU. Without GPUs, engines are assigned to nodes round-robin."""
    gpu = 1.0 if placement.device == "cuda" else 0.0
    rank_nodes = [rank // placement.ranks_per_node for rank in range(placement.num_ranks)]
    if role != "rollout":
        return [ActorSlot(reserved[0], node, gpu if role in GPU_ROLES else 0.0) for node in rank_nodes]
    size, engines = placement.tensor_parallel, range(placement.num_engines)
    if _needs_engine_placement_group(placement):
        return [ActorSlot(reserved[-1], index, gpu * size) for index in engines]
    if placement.engine_nodes:
        nodes = (index % placement.engine_nodes + placement.num_nodes for index in engines)
        return [ActorSlot(reserved[0], node, gpu * size) for node in nodes]
    if placement.device == "cpu":
        return [ActorSlot(reserved[0], index % placement.num_nodes) for index in engines]
    return [ActorSlot(reserved[0], rank_nodes[index * size % placement.num_ranks]) for index in engines]


def choose_visible_gpus(placement: Placement, role: str, rank_gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the CUDA_VISIBLE_DEVICES setting of each worker of a role; {}: the worker uses the GPUs that Ray assigned.

    rank_gpus: GPUs that Ray assigned to each training rank, e.g. "0"; not used without GPUs."""
    if role in GPU_ROLES or (role == "rollout" and not placement.colocate):
        return [{}] * placement.count_workers(role)
    return placement.assign_gpus(role, rank_gpus)


async def launch_ray_workers(
    specs: WorkerSpecs, start_timeout: float, required_paths: Mapping[str, str] | None
) -> RayWorkerGroups:
    """Reserve resources for all workers in Ray and start them concurrently. Arguments and errors are those of
    launcher.launch_workers, but required_paths is None if Ray runs only on this machine."""
    reserved = await reserve_placement_groups(specs.placement, start_timeout)
    if required_paths is not None:
        await check_nodes_match_driver(reserved, required_paths)
    groups = RayWorkerGroups(specs, reserved)
    logs = ray._private.worker._global_node.get_logs_dir_path()  # of Ray on this machine
    await groups.start_within(start_timeout, f" and in {logs}")
    return groups


class RayWorkerGroups(RemoteWorkerGroups[RayRanks[object]]):
    """Worker groups whose workers are Ray actors."""

    def __init__(self, specs: WorkerSpecs, reserved: Sequence[PlacementGroup]):
        self._reserved = list(reserved)
        super().__init__(specs)
        self.required_service_processes = find_local_ray_processes()

    def _make_ranks(self, role: str) -> RayRanks[object]:
        return RayRanks(role, assign_actor_slots(self.specs.placement, role, self._reserved))

    def _choose_visible_gpus(self, role: str, rank_gpus: Sequence[str]) -> list[dict[str, str]]:
        return choose_visible_gpus(self.specs.placement, role, rank_gpus)

    def _make_engine_caller(self) -> Callable[..., None]:
        return self.ranks_by_role["rollout"].call_engines  # pickled for the policy, with handles of the actors

    def _make_weight_reader(self) -> WeightReader:
        return partial(read_sent_weights, self.ranks_by_role["policy"].actors[0])

    async def close(self) -> None:
        """Shut down the engines, kill the actors, and end Ray if this process started it. If Ray does not respond,
        kill all processes of the run instead."""
        if is_local_ray_unresponsive():  # Ray's client would wait for it
            kill_run_processes(os.environ[RUN])
        else:
            await self.close_workers()
            for group in self._reserved:
                remove_placement_group(group)
        ray.shutdown()
        remove_paths(map(Path, self.specs.cleanup_folders))


async def read_sent_weights(rank_0: ray.actor.ActorHandle, folder: str, base_id: str) -> SentFiles:
    """Read the sent folder, e.g. `v7`, in the shared memory of rank 0 (a WorkerActor); see WeightReader."""
    read = pickle_function(lambda worker: worker.sender.read_files(folder, base_id))
    sent: SentFiles = await rank_0.call.remote(read)
    return sent
