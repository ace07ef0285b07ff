"""Node and GPUs of each worker of a run, over Ray.

Bundle k is node k with its training GPUs. Engines that do not share those have a second group with one bundle per
engine. The policy's actors hold the training GPUs for Ray. Actors of the critic and the reward model, and engines on
shared GPUs, hold none: CUDA_VISIBLE_DEVICES tells them which to use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_ranks import CPU_SHARE, ActorLocation, ActorSlot

GPU_ROLES = ("policy", "trainer")  # their actors hold the training GPUs
GRANT_SECONDS = 60.0


async def reserve(placement: Placement, timeout: float) -> list[PlacementGroup]:
    """The group of the nodes with training ranks, if there are any, and the group of engines with resources of their
    own, if there are any. ValueError: the cluster cannot grant them."""
    at, groups = placement, []
    on_gpu = at.device == "cuda"
    if at.num_ranks:
        node = {"CPU": 1.0} | ({"GPU": float(at.ranks_per_node)} if on_gpu else {})
        strategy = "STRICT_SPREAD" if at.num_nodes > 1 else "PACK"
        groups.append((placement_group([node] * at.num_nodes, strategy=strategy), [node] * at.num_nodes))
    if _has_engine_group(at):
        engine = {"CPU": 1.0 if at.num_ranks else CPU_SHARE} | ({"GPU": float(at.tensor_parallel)} if on_gpu else {})
        strategy = "PACK" if at.num_ranks else "SPREAD"
        groups.append((placement_group([engine] * at.num_engines, strategy=strategy), [engine] * at.num_engines))
    fix = "lower trainer.nnodes or trainer.n_gpus_per_node" if at.num_ranks else "lower rollout.num_engines"
    for group, bundles in groups:
        await wait_until_placed(group, bundles, timeout, fix)
    return [group for group, _ in groups]


def _has_engine_group(at: Placement) -> bool:
    return at.num_engines > 0 and (not at.num_ranks or (at.device == "cuda" and not at.colocate))


def assign_slots(placement: Placement, role: str, reserved: Sequence[PlacementGroup]) -> list[ActorSlot]:
    """Slots of a role's actors in the groups of `reserve`, by rank; of engines by index. An engine on shared GPUs runs
    on the node of its first GPU; without GPUs engines are dealt to the nodes in turn."""
    at = placement
    gpu = 1.0 if at.device == "cuda" else 0.0
    node_of = [rank // at.ranks_per_node for rank in range(at.num_ranks)]
    if role != "rollout":
        return [ActorSlot(reserved[0], node, gpu if role in GPU_ROLES else 0.0) for node in node_of]
    size, engines = at.tensor_parallel, range(at.num_engines)
    if _has_engine_group(at):
        return [ActorSlot(reserved[-1], index, gpu * size) for index in engines]
    if at.device == "cpu":
        return [ActorSlot(reserved[0], index % at.num_nodes) for index in engines]
    return [ActorSlot(reserved[0], node_of[index * size % at.num_ranks]) for index in engines]


def choose_visible_gpus(placement: Placement, role: str, rank_gpus: Sequence[str]) -> list[dict[str, str]]:
    """Environment variables with the GPUs that each process of a role may use; empty: the GPUs that Ray gave it.

    rank_gpus: GPUs that Ray gave each training rank; not read without GPUs.
    """
    at, is_engine = placement, role == "rollout"
    if at.device != "cuda" or role in GPU_ROLES or (is_engine and not at.colocate):
        return [{}] * (at.num_engines if is_engine else at.num_ranks)
    size, gpus = at.tensor_parallel, rank_gpus
    if is_engine:
        gpus = [",".join(rank_gpus[index * size : (index + 1) * size]) for index in range(at.num_engines)]
    return [{"CUDA_VISIBLE_DEVICES": own} for own in gpus]


def check_shared_memory(ranks: Sequence[ActorLocation], engines: Sequence[ActorLocation]) -> None:
    """ValueError: weights that are sent through a node's shared memory could not reach an engine."""
    for index, engine in enumerate(engines):
        if engine.node not in {rank.node for rank in ranks}:
            raise ValueError(
                f"engine {index} runs on node {engine.ip}, which has no training rank to send weights through shared "
                "memory (rollout.name=hf or rollout.lora=adapter). Set rollout.colocate=true, or leave those keys out."
            )


async def wait_until_placed(group: PlacementGroup, bundles: list[dict[str, float]], timeout: float, fix: str) -> None:
    """Return when the cluster has granted the bundles. ValueError after a minute, with the suggested fix."""
    ready, _ = await asyncio.to_thread(ray.wait, [group.ready()], timeout=min(timeout, GRANT_SECONDS))
    if not ready:
        total, free = (
            {name: amount for name, amount in found.items() if name in ("CPU", "GPU")}
            for found in (ray.cluster_resources(), ray.available_resources())
        )
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
        raise ValueError(
            f"the cluster cannot place this run: it needs {bundles} (one per node or engine) and has {total} on "
            f"{alive} node(s), of which {free} are free. Wait for other jobs to end, start more nodes, or {fix}."
        )
