"""Worker groups over Ray: one actor per worker, started concurrently and ended together; their weight transfers.

The first placement group has one bundle per training node, with its training GPUs, and one per node for engines.
Engines with their own GPUs on the training nodes have a second placement group with one bundle per engine. Ray assigns
the training GPUs to the policy's actors. All other actors on these GPUs reserve none in Ray: CUDA_VISIBLE_DEVICES
selects their GPUs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from alphaapollo.controller.health.process_monitor import monitor_processes
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ranks import WorkerDied, WorkerFailed
from alphaapollo.controller.ray_cluster import (
    check_nodes_match_driver,
    find_local_ray_processes,
    is_local_ray_unresponsive,
)
from alphaapollo.controller.ray_ranks import CPU_SHARE, ActorSlot, RayRanks, pickle_function
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs, start_rollout_worker
from alphaapollo.engines.protocol import EngineDied, EngineError
from alphaapollo.utils.watchdog import RUN, kill_run_processes, remove_paths
from alphaapollo.weight_sync.transport import assign_weight_writers

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.process_group import RankPlacement


GPU_ROLES = ("policy", "trainer")  # roles whose actors own the training GPUs
GRANT_SECONDS = 60.0  # maximum wait for a placement group
CLOSE_SECONDS = 5.0


async def reserve_placement_groups(placement: Placement, timeout: float) -> list[PlacementGroup]:
    """Reserve a placement group for the training ranks, and another one for engines with their own GPUs. Raises
    ValueError if the cluster has too few resources."""
    groups = []
    on_gpu = placement.device == "cuda"
    if placement.num_ranks:
        counts = [placement.ranks_per_node] * placement.num_nodes
        counts += [placement.gpus_per_engine_node] * placement.engine_nodes
        nodes = [{"CPU": 1.0} | ({"GPU": float(count)} if on_gpu else {}) for count in counts]
        groups.append((placement_group(nodes, strategy="STRICT_SPREAD" if len(nodes) > 1 else "PACK"), nodes))
    if _needs_engine_placement_group(placement):
        engine = {"CPU": 1.0 if placement.num_ranks else CPU_SHARE}
        bundles = [engine | ({"GPU": float(placement.tensor_parallel)} if on_gpu else {})] * placement.num_engines
        strategy = "PACK" if placement.num_ranks else "SPREAD"
        groups.append((placement_group(bundles, strategy=strategy), bundles))
    fix = "lower trainer.nnodes or trainer.n_gpus_per_node" if placement.num_ranks else "lower rollout.num_engines"
    for group, bundles in groups:
        await wait_until_reserved(group, bundles, timeout, fix)
    return [group for group, _ in groups]


def _needs_engine_placement_group(placement: Placement) -> bool:
    has_own_gpus = placement.device == "cuda" and not placement.colocate and not placement.engine_nodes
    return placement.num_engines > 0 and (not placement.num_ranks or has_own_gpus)


def assign_actor_slots(placement: Placement, role: str, reserved: Sequence[PlacementGroup]) -> list[ActorSlot]:
    """Return where to place each actor of a role, in rank order, within the reserved placement groups. An engine on
    shared GPUs runs on the node of its first GPU. Without GPUs, engines are assigned to nodes round-robin."""
    gpu = 1.0 if placement.device == "cuda" else 0.0
    node_of = [rank // placement.ranks_per_node for rank in range(placement.num_ranks)]
    if role != "rollout":
        return [ActorSlot(reserved[0], node, gpu if role in GPU_ROLES else 0.0) for node in node_of]
    size, engines = placement.tensor_parallel, range(placement.num_engines)
    if _needs_engine_placement_group(placement):
        return [ActorSlot(reserved[-1], index, gpu * size) for index in engines]
    if placement.engine_nodes:
        nodes = (index % placement.engine_nodes + placement.num_nodes for index in engines)
        return [ActorSlot(reserved[0], node, gpu * size) for node in nodes]
    if placement.device == "cpu":
        return [ActorSlot(reserved[0], index % placement.num_nodes) for index in engines]
    return [ActorSlot(reserved[0], node_of[index * size % placement.num_ranks]) for index in engines]


def choose_visible_gpus(placement: Placement, role: str, rank_gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the CUDA_VISIBLE_DEVICES setting of each worker of a role; {}: the worker uses the GPUs that Ray assigned.

    rank_gpus: GPUs that Ray assigned to each training rank, e.g. "0"; not used without GPUs.
    """
    is_engine = role == "rollout"
    if placement.device != "cuda" or role in GPU_ROLES or (is_engine and not placement.colocate):
        return [{}] * (placement.num_engines if is_engine else placement.num_ranks)
    size, gpus = placement.tensor_parallel, rank_gpus
    if is_engine:
        gpus = [",".join(rank_gpus[index * size : (index + 1) * size]) for index in range(placement.num_engines)]
    return [{"CUDA_VISIBLE_DEVICES": devices} for devices in gpus]


async def wait_until_reserved(group: PlacementGroup, bundles: list[dict[str, float]], timeout: float, fix: str) -> None:
    """Wait until Ray has reserved the resources of a placement group. Raises ValueError after GRANT_SECONDS, or after
    `timeout` if it is shorter."""
    ready, _ = await asyncio.to_thread(ray.wait, [group.ready()], timeout=min(timeout, GRANT_SECONDS))
    if not ready:
        total, free = (
            {name: amount for name, amount in found.items() if name in ("CPU", "GPU")}
            for found in (ray.cluster_resources(), ray.available_resources())
        )
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
        raise ValueError(
            f"this run needs the resources {bundles} (one entry per node or engine). Of the cluster's {total}, only "
            f"{free} are free ({alive} nodes). Wait for other jobs to end, start more nodes, or {fix}."
        )


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
        if has_rank:
            return build
        return partial(build, partial(copy_sent_weights, self.ranks_by_role["policy"].actors[0]))

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


class RayWeightSyncClient:
    """Implementation of vLLM's `VLLMWeightSyncClient` over Ray: each method calls all engines and waits for them."""

    def __init__(self, engine_actors: list[ray.actor.ActorHandle]):
        self.engine_actors = engine_actors  # of class ray_ranks.WorkerActor

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        self._call_engines(lambda worker: worker.engine.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        self._call_engines(lambda worker: worker.engine.start_weight_update())

    def update_weights(self, update_info: dict[str, object] | list[dict[str, object]]) -> None:
        self._call_engines(lambda worker: worker.engine.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_engines(lambda worker: worker.engine.finish_weight_update(weight_version))

    def _call_engines(self, function: Callable[..., object]) -> None:
        code = pickle_function(function)
        pending = [engine.call.remote(code) for engine in self.engine_actors]
        try:
            ray.get(pending)
        except ray.exceptions.RayTaskError as error:
            kind = EngineDied if isinstance(error.cause, EngineDied) else EngineError
            raise kind(f"a weight transfer failed: {error.cause}") from None
        except ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EngineDied(f"a rollout worker died during a weight transfer: {reason}") from None


async def copy_sent_weights(rank_0: ray.actor.ActorHandle, folder: str, target: Path) -> None:
    """Copy the files of the sent folder, e.g. `v7`, from the shared memory of rank 0 (a WorkerActor) to `target`."""
    files = await rank_0.call.remote(pickle_function(lambda worker: worker.sender.read_files(folder)))
    target.mkdir(parents=True)
    for name, content in files.items():
        content.tofile(target / name)
