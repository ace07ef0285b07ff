"""Which node and GPUs each worker of a run gets, over Ray.

bundle k = node k with its training GPUs; where engines do not share those, one more group with a bundle an engine. The
policy's actors hold the training GPUs for Ray; those of the critic and the reward model, and engines that share the
GPUs, hold none and are told by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from alphaapollo.controller.ray_ranks import Place, Seat
from alphaapollo.controller.worker_counts import Placement, RankCounts

CPU_SHARE = 0.01  # of its node's bundle, an actor: threads are set by the workers, Ray only needs something to count


FEWER = "lower trainer.nnodes or trainer.n_gpus_per_node"


async def reserve(placement: Placement, timeout: float) -> tuple[PlacementGroup, PlacementGroup | None]:
    """One bundle a node with its training GPUs; where engines do not share those, one bundle an engine."""
    wanted, engines = _node_bundles(placement), None
    nodes = _node_group(wanted)
    engine = [{"CPU": 1.0, "GPU": float(placement.tensor_parallel)}] * placement.num_engines
    if placement.device == "cuda" and not placement.colocate:
        engines = placement_group(engine)
    await wait_until_placed(nodes, wanted, timeout, FEWER)
    if engines:
        await wait_until_placed(engines, engine, timeout, FEWER)
    return nodes, engines


async def reserve_nodes(counts: RankCounts, timeout: float) -> PlacementGroup:
    """As `reserve`, without engines."""
    wanted = _node_bundles(counts)
    nodes = _node_group(wanted)
    await wait_until_placed(nodes, wanted, timeout, FEWER)
    return nodes


def _node_bundles(counts: RankCounts) -> list[dict[str, float]]:
    gpus = {"GPU": float(counts.ranks_per_node)} if counts.device == "cuda" else {}
    return [{"CPU": 1.0} | gpus] * counts.num_nodes


def _node_group(bundles: list[dict[str, float]]) -> PlacementGroup:
    return placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")


@dataclass(frozen=True)
class Seats:
    """Of the actors of each role, by rank; of engines by index."""

    policy: list[Seat]
    beside: list[Seat]  # critic and reward model: on the policy's GPUs
    engines: list[Seat]


def seats(placement: Placement, nodes: PlacementGroup, engine_gpus: PlacementGroup | None) -> Seats:
    """In what `reserve` was granted. An engine that shares GPUs sits on the node of its first one; without GPUs engines
    take turns over the nodes."""
    node_of = [rank // placement.ranks_per_node for rank in range(placement.num_ranks)]
    size, count = placement.tensor_parallel, placement.num_engines
    if engine_gpus:
        engines = [Seat(engine_gpus, index, CPU_SHARE, float(size)) for index in range(count)]
    elif placement.device == "cpu":
        engines = [Seat(nodes, index % placement.num_nodes, CPU_SHARE) for index in range(count)]
    else:
        engines = [Seat(nodes, node_of[index * size % placement.num_ranks], CPU_SHARE) for index in range(count)]
    return Seats(
        policy=rank_seats(placement, nodes),
        beside=[Seat(nodes, node, CPU_SHARE) for node in node_of],
        engines=engines,
    )


def rank_seats(counts: RankCounts, nodes: PlacementGroup) -> list[Seat]:
    """Of the actors that hold the training GPUs, by rank."""
    gpu = 1.0 if counts.device == "cuda" else 0.0
    return [Seat(nodes, rank // counts.ranks_per_node, CPU_SHARE, gpu) for rank in range(counts.num_ranks)]


@dataclass(frozen=True)
class Visible:
    """Environment variables that say which GPUs a process may see, by rank or index; empty: those that Ray gave it."""

    beside: list[dict[str, str]]
    engines: list[dict[str, str]]


def visible_gpus(placement: Placement, policy_gpus: Sequence[str]) -> Visible:
    """policy_gpus: of each rank, what Ray gave it; without GPUs not read."""
    ranks, size, count = placement.num_ranks, placement.tensor_parallel, placement.num_engines
    if placement.device != "cuda":
        return Visible([{}] * ranks, [{}] * count)
    beside = [{"CUDA_VISIBLE_DEVICES": own} for own in policy_gpus]
    if not placement.colocate:
        return Visible(beside, [{}] * count)
    shared = [",".join(policy_gpus[index * size : (index + 1) * size]) for index in range(count)]
    return Visible(beside, [{"CUDA_VISIBLE_DEVICES": own} for own in shared])


def check_reach(ranks: Sequence[Place], engines: Sequence[Place]) -> None:
    """ValueError: weights that go through a node's shared memory could not reach an engine."""
    for index, place in enumerate(engines):
        if place.node not in {rank.node for rank in ranks}:
            raise ValueError(
                f"engine {index} runs on node {place.ip}, where no training rank is, and its weights (of "
                "rollout.name=hf or rollout.lora=adapter) come through its node's memory. Set rollout.colocate=true, "
                "or leave those keys out."
            )


async def wait_until_placed(group: PlacementGroup, bundles: list[dict[str, float]], timeout: float, fix: str) -> None:
    """Return when the cluster has granted the bundles; ValueError after a minute: it cannot, and what would help."""
    ready, _ = await asyncio.to_thread(ray.wait, [group.ready()], timeout=min(timeout, 60.0))
    if not ready:
        have, free = (
            {name: amount for name, amount in found.items() if name in ("CPU", "GPU")}
            for found in (ray.cluster_resources(), ray.available_resources())
        )
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
        raise ValueError(
            f"the cluster cannot place this run: it needs {bundles} (one a node or engine), the cluster has {have} "
            f"on {alive} node(s), and {free} of it is free. Wait for what else runs there, start more nodes, or "
            f"{fix}."
        )
