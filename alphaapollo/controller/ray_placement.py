"""Choose the node and the GPUs of each worker, with Ray's placement groups.

The first placement group has one bundle per training node, with its training GPUs, and one per node for engines.
Engines with their own GPUs on the training nodes have a second placement group with one bundle per engine. Ray assigns
the training GPUs to the policy's actors. All other actors on these GPUs reserve none in Ray: CUDA_VISIBLE_DEVICES
selects their GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_ranks import CPU_SHARE, ActorSlot

GPU_ROLES = ("policy", "trainer")  # roles whose actors own the training GPUs
GRANT_SECONDS = 60.0  # maximum wait for a placement group


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
