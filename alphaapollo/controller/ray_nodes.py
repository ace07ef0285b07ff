"""The nodes of a Ray cluster: waited for before a run is planned, and compared before its workers start."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alphaapollo.controller.nodes import Look, Node, Wanted, differences, look, shortage

POLL_SECONDS = 1.0
TELL_SECONDS = 30.0
LOOK_SECONDS = 120.0  # a process has to start on each node


def wait_for_nodes(wanted: Wanted) -> None:
    """Return when enough nodes have joined; says meanwhile who is missing. A ValueError after `wanted.patience`."""
    start, told = time.monotonic(), -TELL_SECONDS
    while missing := shortage(alive_nodes(), wanted):
        waited = time.monotonic() - start
        if waited >= wanted.patience:
            ray.shutdown()
            raise ValueError(
                f"{missing}. Waited {waited:.0f} s (trainer.start_timeout). On each missing node see what `ray start` "
                "said: another version of Python or Ray is refused there. Start the nodes, or lower trainer.nnodes or "
                "trainer.n_gpus_per_node."
            )
        if waited - told >= TELL_SECONDS:
            told = waited
            print(f"waiting: {missing} ({waited:.0f} of at most {wanted.patience:.0f} s)", flush=True)
        time.sleep(POLL_SECONDS)


def alive_nodes() -> list[Node]:
    return [
        Node(node["NodeManagerAddress"], node["NodeManagerHostname"], int(node["Resources"].get("GPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]


async def compare_nodes(groups: Sequence[PlacementGroup], paths: Mapping[str, str]) -> None:
    """ValueError: a node on which workers are to run lacks what the driver's has, or does not answer.

    paths: key -> path of what must lie on every node.
    """
    folder, names = os.getcwd(), {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    used = {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(paths, folder): node
        for node in sorted(used)
    }
    here = look(paths, folder)
    answered, silent = await asyncio.to_thread(ray.wait, list(asked), num_returns=len(asked), timeout=LOOK_SECONDS)
    problems = [
        f"node {names[asked[one]]} started no process within {LOOK_SECONDS:.0f} s. Its reasons lie on it in "
        "/tmp/ray/session_latest/logs."
        for one in silent
    ]
    for one in answered:
        name = names[asked[one]]
        try:
            there: Look = ray.get(one)
        except ray.exceptions.RayError as error:
            reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
            problems.append(
                f"node {name} cannot run alphaapollo ({reason}). The project and its environment must lie under the "
                "same path on every node."
            )
            continue
        problems += [f"node {name} ({there.host}): {line}" for line in differences(there, here, paths)]
    if problems:
        ray.shutdown()
        raise ValueError("the nodes differ from the driver's:\n  " + "\n  ".join(problems))
