"""Where the roles of a run get their places in the cluster: Ray's placement groups.

bundle k = node k with its training GPUs; where engines do not share those, one more group with a bundle an engine.
"""

from __future__ import annotations

import asyncio

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from alphaapollo.controller.placement import Placement


async def reserve(placement: Placement, timeout: float) -> tuple[PlacementGroup, PlacementGroup | None]:
    """One bundle a node with its training GPUs; where engines do not share those, one bundle an engine."""
    cuda = placement.device == "cuda"
    node = {"CPU": 1.0} | ({"GPU": float(placement.ranks_per_node)} if cuda else {})
    engine = {"CPU": 1.0, "GPU": float(placement.tensor_parallel)}
    nodes = placement_group(
        [node] * placement.num_nodes, strategy="STRICT_SPREAD" if placement.num_nodes > 1 else "PACK"
    )
    groups = [(nodes, [node] * placement.num_nodes)]
    if cuda and not placement.colocate:
        groups.append((placement_group([engine] * placement.num_engines), [engine] * placement.num_engines))
    for group, bundles in groups:
        await wait_until_placed(group, bundles, timeout, "Lower trainer.nnodes or trainer.n_gpus_per_node")
    return nodes, groups[1][0] if len(groups) > 1 else None


async def wait_until_placed(group: PlacementGroup, bundles: list[dict[str, float]], timeout: float, fix: str) -> None:
    """Return when the cluster has granted the bundles; ValueError after a minute: it cannot, and what would help."""
    ready, _ = await asyncio.to_thread(ray.wait, [group.ready()], timeout=min(timeout, 60.0))
    if not ready:
        have = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
        raise ValueError(
            f"the cluster cannot place this run: it needs {bundles} (one a node or engine), the cluster has {have} "
            f"on {alive} node(s). {fix}, or start more nodes."
        )
