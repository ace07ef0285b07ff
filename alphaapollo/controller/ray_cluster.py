"""Ray cluster of a run: join or start it, wait for its nodes, compare them, and find its local processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alphaapollo.config.schema import Rollout
from alphaapollo.controller.health.process_monitor import find_dead_process
from alphaapollo.controller.nodes import (
    RUN_FOLDER,
    ClusterNode,
    TrainerSection,
    describe_missing_nodes,
    describe_node_differences,
    inspect_node,
)
from alphaapollo.controller.placement import Machine, query_smallest_gpu_memory_bytes
from alphaapollo.controller.ranks import WorkerDied
from alphaapollo.processes.network import restrict_network_to_loopback
from alphaapollo.processes.watchdog import JOB_SIGNALS
from alphaapollo.utils.heartbeat import read_process

POLL_SECONDS = 1.0
NOTICE_SECONDS = 30.0
INSPECT_SECONDS = 120.0  # timeout of inspect_node, which starts a process on each node
LOCAL_TOKEN = secrets.token_hex(32)
"""Token of every Ray instance that this process starts, because Ray reads the variable only once. Without it Ray writes
a token to ~/.ray, which fails if the home directory is not writable."""


def join_cluster(trainer: TrainerSection, rollout: Rollout | None = None) -> Machine:
    """Join the Ray cluster at RAY_ADDRESS, wait for its nodes, and return the resources of its largest node. Raises
    ValueError if there is no such cluster or nodes are missing."""
    try:
        init_ray()
    except ConnectionError as error:
        raise ValueError(
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}. Start the cluster (`ray start --head`), unset "
            "RAY_ADDRESS to start Ray on this machine, or set RAY_AUTH_MODE=token if the cluster requires a token."
        ) from None
    wait_for_nodes(trainer, rollout)
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return Machine(
        num_cores=max(int(node.get("CPU", 0)) for node in resources),
        num_gpus=max(int(node.get("GPU", 0)) for node in resources),
        gpu_memory=query_smallest_gpu_memory_bytes(),  # memory on this machine; 0 (unknown) on a head node without GPUs
    )


def start_local_cluster() -> None:
    """Start Ray on this machine, reachable only from this machine, until this process ends. Raises WorkerDied if Ray
    does not start."""
    health_checks = {  # long timeouts, because a busy laptop answers late; dead processes are detected anyway
        "health_check_timeout_ms": 60_000,
        "health_check_failure_threshold": 10,
    }
    restrict_network_to_loopback()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", LOCAL_TOKEN)
    ray._raylet.Config.initialize("")  # this process has read the variables when it imported Ray
    os.environ.setdefault("RAY_worker_niceness", "0")  # the driver's priority; Ray's own is 15 below it
    # Without cluster support, all processes of Ray listen on 127.0.0.1 only. Ray has no option for it.
    constants, services = ray._private.ray_constants, ray._private.services
    has_clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    popen, services.ConsolePopen = services.ConsolePopen, RayProcess
    try:
        init_ray(address="local", include_dashboard=False, _system_config=health_checks)
    except Exception as error:  # Ray raises a bare Exception if the raylet takes too long
        ray.shutdown()
        reason = " ".join(str(error).split())
        raise WorkerDied(f"Ray does not start on this machine: {reason}", "Ray's start") from error
    finally:
        constants.ENABLE_RAY_CLUSTER, services.ConsolePopen = has_clusters, popen


class RayProcess(subprocess.Popen[bytes]):
    """Process of a local Ray that outlives signals to the driver's process group and signals of job systems to all
    processes, because the driver would wait a minute for a GCS that is gone. Ray itself blocks SIGINT."""

    def __init__(self, command: Sequence[str], **options: Any):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            super().__init__(command, start_new_session=True, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    terminate = subprocess.Popen.kill


def init_ray(**options: object) -> None:
    """Call ray.init(**options), then restore this process's SIGTERM handler, because Ray's handler exits at once."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level="ERROR", namespace=f"alphaapollo-{os.getpid()}", **options)
    signal.signal(signal.SIGTERM, handler)


def find_local_ray_processes() -> dict[str, int]:
    """Return name -> pid of the raylet and the GCS if this process started Ray; empty for a joined cluster."""
    names = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS"}
    started = ray._private.worker._global_node.all_processes if ray.is_initialized() else {}
    return {name: started[kind][0].process.pid for kind, name in names.items() if kind in started}


def is_local_ray_unresponsive() -> bool:
    """Return whether this process started Ray, and Ray's raylet or GCS is now dead or stopped by a signal."""
    pids = find_local_ray_processes()
    stopped = [process.is_suspended for pid in pids.values() if (process := read_process(pid))]
    return find_dead_process(pids) != "" or any(stopped)


def wait_for_nodes(trainer: TrainerSection, rollout: Rollout | None) -> None:
    """Wait until enough nodes have joined the cluster, and print how many are missing. Raises ValueError after
    trainer.start_timeout."""
    start, shown = time.monotonic(), -NOTICE_SECONDS
    while True:
        nodes = [
            ClusterNode(node["NodeManagerAddress"], node["NodeManagerHostname"], int(node["Resources"].get("GPU", 0)))
            for node in ray.nodes()
            if node["Alive"]
        ]
        if not (missing := describe_missing_nodes(nodes, trainer, rollout)):
            return
        waited = time.monotonic() - start
        if waited >= trainer.start_timeout:
            ray.shutdown()
            raise ValueError(
                f"{missing}. Waited {waited:.0f} s (trainer.start_timeout). Check the output of `ray start` on each "
                "missing node; Ray refuses nodes with other versions of Python or Ray. Start the nodes, or lower "
                "nnodes or n_gpus_per_node."
            )
        if waited - shown >= NOTICE_SECONDS:
            shown = waited
            print(f"waiting: {missing} ({waited:.0f} of at most {trainer.start_timeout:.0f} s)", flush=True)
        time.sleep(POLL_SECONDS)


async def check_nodes_match_driver(groups: Sequence[PlacementGroup], required_paths: Mapping[str, str]) -> None:
    """Raise ValueError if a node of the placement groups has other library versions or files than the driver's node,
    or cannot start a process.

    required_paths: configuration key -> path of a file or folder that must be equal on every node.
    """
    folder, names = os.getcwd(), {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    used = {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
    task = ray.remote(num_cpus=0, max_retries=0)(inspect_node)
    pending = {
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            required_paths, folder
        ): node
        for node in sorted(used)
    }
    here = inspect_node(required_paths, folder)
    ready, silent = await asyncio.to_thread(ray.wait, list(pending), num_returns=len(pending), timeout=INSPECT_SECONDS)
    errors = [
        f"node {names[pending[one]]} started no process within {INSPECT_SECONDS:.0f} s. See its logs in "
        "/tmp/ray/session_latest/logs on that node."
        for one in silent
    ]
    for one in ready:
        name = names[pending[one]]
        try:
            there = ray.get(one)
        except ray.exceptions.RayError as error:
            reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
            errors.append(
                f"node {name} cannot run alphaapollo ({reason}). Install the project and its environment under the "
                "same path on every node."
            )
            continue
        if difference := describe_node_differences(there, here):
            errors.append(f"node {name}: {difference}")
    if errors:
        ray.shutdown()
        raise ValueError(
            "these nodes differ from the driver's node:\n  "
            + "\n  ".join(errors)
            + f"\nUse one environment and equal files on all nodes, and set {RUN_FOLDER} to a folder that they share."
        )
