"""Node and GPUs of each worker of a run, over Ray.

Bundle k is node k with its training GPUs. Engines that do not share those have a second group with one bundle per
engine. The policy's actors hold the training GPUs for Ray. Actors of the critic and the reward model, and engines on
shared GPUs, hold none: CUDA_VISIBLE_DEVICES tells them which to use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_ranks import ActorLocation, ActorSlot

CPU_SHARE = 0.01  # CPUs per actor: workers set their threads themselves, and Ray needs a number to count
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


@dataclass(frozen=True)
class SlotPlan:
    """Slots of the actors of each role, by rank; of engines by index."""

    ranks: list[ActorSlot]  # that hold the training GPUs: the policy, or the model in fine-tuning
    shared: list[ActorSlot]  # critic and reward model, on the policy's GPUs
    engines: list[ActorSlot]


def assign_slots(placement: Placement, reserved: Sequence[PlacementGroup]) -> SlotPlan:
    """Slots in the groups of `reserve`. An engine on shared GPUs runs on the node of its first GPU; without GPUs
    engines are dealt to the nodes in turn."""
    at = placement
    node_of = [rank // at.ranks_per_node for rank in range(at.num_ranks)]
    size, indices = at.tensor_parallel, range(at.num_engines)
    gpu = 1.0 if at.device == "cuda" else 0.0
    if _has_engine_group(at):
        engines = [ActorSlot(reserved[-1], index, CPU_SHARE, gpu * size) for index in indices]
    elif at.device == "cpu":
        engines = [ActorSlot(reserved[0], index % at.num_nodes, CPU_SHARE) for index in indices]
    else:
        engines = [ActorSlot(reserved[0], node_of[index * size % at.num_ranks], CPU_SHARE) for index in indices]
    return SlotPlan(
        ranks=[ActorSlot(reserved[0], node, CPU_SHARE, gpu) for node in node_of],
        shared=[ActorSlot(reserved[0], node, CPU_SHARE) for node in node_of],
        engines=engines,
    )


@dataclass(frozen=True)
class GpuVisibility:
    """Environment variables with the GPUs that a process may use, by rank or index; empty: the GPUs that Ray gave
    it."""

    shared: list[dict[str, str]]
    engines: list[dict[str, str]]


def visible_gpus(placement: Placement, policy_gpus: Sequence[str]) -> GpuVisibility:
    """policy_gpus: GPUs that Ray gave each rank; not read without GPUs."""
    ranks, size, count = placement.num_ranks, placement.tensor_parallel, placement.num_engines
    if placement.device != "cuda":
        return GpuVisibility([{}] * ranks, [{}] * count)
    shared = [{"CUDA_VISIBLE_DEVICES": own} for own in policy_gpus]
    if not placement.colocate:
        return GpuVisibility(shared, [{}] * count)
    engines = [",".join(policy_gpus[index * size : (index + 1) * size]) for index in range(count)]
    return GpuVisibility(shared, [{"CUDA_VISIBLE_DEVICES": own} for own in engines])


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
