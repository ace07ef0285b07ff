"""Ray cluster of a run: join or start it, wait for its nodes, compare them, and find its local processes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alphaapollo._version import __version__
from alphaapollo.config.schema import GenerationTrainer, Rollout, Trainer, TuningTrainer
from alphaapollo.controller.errors import WorkerDied
from alphaapollo.controller.placement import Machine, query_smallest_gpu
from alphaapollo.controller.ray_fork import prepend_script
from alphaapollo.processes.network import restrict_network_to_loopback
from alphaapollo.processes.watchdog import JOB_SIGNALS
from alphaapollo.utils.heartbeat import read_process
from alphaapollo.utils.versions import find_version

TrainerSection = Trainer | TuningTrainer | GenerationTrainer
COMPARED_LIBRARIES = ("torch", "transformers", "vllm", "ray")  # must have the same version on all nodes
COMPARED_SUFFIXES = (".safetensors", ".json", ".py", ".yaml")  # of files whose number and size must be the same
POLL_SECONDS = 1.0
NOTICE_SECONDS = 30.0  # time between two lines about missing nodes
INSPECT_SECONDS = 120.0  # timeout of inspect_node, which starts a process on each node
LOCAL_TOKEN = secrets.token_hex(32)
"""Token of every Ray instance that this process starts, because Ray reads RAY_AUTH_TOKEN only once. Without a token,
Ray writes one to ~/.ray, which fails if the home directory is not writable."""


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
        **query_smallest_gpu(),  # of this machine; unknown on a head node without GPUs
    )


def start_local_cluster() -> None:
    """Start Ray on this machine, reachable only from this machine, until this process ends. Raises WorkerDied if Ray
    does not start; a restart helps, because Ray's time limits may be too short on a busy machine."""
    health_checks = {  # long timeouts, because a busy laptop answers late; dead processes are detected anyway
        "health_check_timeout_ms": 60_000,
        "health_check_failure_threshold": 10,
    }
    restrict_network_to_loopback()
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", LOCAL_TOKEN)
    ray._raylet.Config.initialize("")  # this process has read the variables when it imported Ray
    os.environ.setdefault("RAY_worker_niceness", "0")  # the driver's priority; Ray's own is 15 below it
    # Without cluster support, all processes of Ray listen on 127.0.0.1 only. Ray has no option for this. It also has no
    # option that leaves out its autoscaler, log monitor and API server, which take seconds to start.
    unused: dict[str, Any] = dict.fromkeys(
        ("start_monitor", "start_log_monitor", "start_api_server"), lambda *_, **__: None
    )
    with (
        mock.patch.multiple(ray._private.node.Node, **unused),
        mock.patch.object(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False),
        mock.patch.object(ray._private.services, "ConsolePopen", RayProcess),
    ):
        try:
            init_ray(address="local", include_dashboard=False, _system_config=health_checks)
        except Exception as error:  # Ray raises a bare Exception if the raylet takes too long
            ray.shutdown()
            reason = " ".join(str(error).split())
            raise WorkerDied(f"Ray does not start on this machine: {reason}", "Ray's start") from error


class RayProcess(subprocess.Popen[bytes]):
    """Process of a local Ray. It ignores signals that are sent to the driver's process group, and signals that job
    systems send to all processes: if one ended the GCS, the driver would wait a minute for the GCS. Ray blocks SIGINT
    itself."""

    def __init__(self, command: Sequence[str], **options: Any):
        earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            super().__init__(prepend_script(command), start_new_session=True, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)

    terminate = subprocess.Popen.kill  # SIGTERM is blocked


class RayJob(JobConfig):
    """Job whose workers import modules from the driver's folders. By default, Ray adds the working directory."""

    def _serialize(self) -> str:
        folders = {os.path.abspath(path) for path in sys.path}
        self._py_driver_sys_path = [path for path in vars(self)["_py_driver_sys_path"] if path in folders]
        return super()._serialize()


def init_ray(**options: object) -> None:
    """Call ray.init(**options), then restore this process's SIGTERM handler, because Ray's handler exits at once."""
    handler = signal.getsignal(signal.SIGTERM)
    settings = {"log_to_driver": False, "logging_level": "ERROR", "namespace": f"alphaapollo-{os.getpid()}"}
    ray.init(job_config=RayJob(), **settings, **options)
    if threading.current_thread() is threading.main_thread():  # otherwise Ray sets no handler
        signal.signal(signal.SIGTERM, handler)


def find_local_ray_processes() -> dict[str, int]:
    """Return name -> pid of the raylet and the GCS if this process started Ray; empty for a joined cluster."""
    names = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS"}
    started = ray._private.worker._global_node.all_processes if ray.is_initialized() else {}
    return {name: started[kind][0].process.pid for kind, name in names.items() if kind in started}


def is_local_ray_unresponsive() -> bool:
    """Return whether this process started Ray, and Ray's raylet or GCS is now dead or stopped by a signal."""
    processes = [read_process(pid) for pid in find_local_ray_processes().values()]
    return any(process is None or process.is_stopped for process in processes)


def wait_for_nodes(trainer: TrainerSection, rollout: Rollout | None) -> None:
    """Wait until as many nodes as the run needs have joined the cluster. A run on GPUs needs nodes with GPUs. Prints
    which have joined. Raises ValueError after trainer.start_timeout. rollout: section of the engines of an RL run."""
    start, last_notice = time.monotonic(), -NOTICE_SECONDS
    num_needed = trainer.nnodes + (rollout.nnodes if rollout else 0)
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        with_gpus = [node for node in alive if node["Resources"].get("GPU")]
        needs_gpus = trainer.device == "cuda" or (trainer.device == "auto" and bool(with_gpus))
        joined = with_gpus if needs_gpus else alive
        if len(joined) >= num_needed:
            return
        names = [f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})" for node in joined]
        status = (
            f"the run needs {num_needed} node(s){' with GPUs' if needs_gpus else ''} (trainer.nnodes, "
            f"actor_rollout_ref.rollout.nnodes), but {len(joined)} have joined: {', '.join(names) or 'none'}"
        )
        waited = time.monotonic() - start
        if waited >= trainer.start_timeout:
            ray.shutdown()
            raise ValueError(
                f"{status}. Waited {waited:.0f} s (trainer.start_timeout). Check the output of `ray start` on each "
                "node; Ray refuses nodes with other versions of Python or Ray. Start the nodes, or lower nnodes."
            )
        if waited - last_notice >= NOTICE_SECONDS:
            last_notice = waited
            print(f"waiting: {status} ({waited:.0f} of at most {trainer.start_timeout:.0f} s)", flush=True)
        time.sleep(POLL_SECONDS)


async def check_nodes_match_driver(groups: Sequence[PlacementGroup], required_paths: Mapping[str, str]) -> None:
    """Raise ValueError if a node of the placement groups has other library versions or files than the driver's node,
    or cannot start a process.

    required_paths: configuration key -> path of a file or folder that must be equal on every node."""
    folder, names = os.getcwd(), {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    used_nodes = {node for group in groups for node in placement_group_table(group)["bundles_to_node_id"].values()}
    task = ray.remote(num_cpus=0, max_retries=0)(inspect_node)
    calls = {}
    for node in sorted(used_nodes):
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        calls[names[node]] = task.options(scheduling_strategy=strategy).remote(required_paths, folder)
    drivers_node = inspect_node(required_paths, folder)
    await asyncio.to_thread(ray.wait, [*calls.values()], num_returns=len(calls), timeout=INSPECT_SECONDS)
    errors = []
    for name, call in calls.items():
        try:
            difference = describe_node_differences(ray.get(call, timeout=0), drivers_node)
        except ray.exceptions.RayError as error:  # GetTimeoutError: no process started in time
            reason = [line for line in str(error).splitlines() if line.strip()][-1].strip()
            difference = (
                f"it cannot run alphaapollo ({reason}). Install the project and its environment under the same path "
                "on every node, and see the node's logs in /tmp/ray/session_latest/logs."
            )
        if difference:
            errors.append(f"node {name}: {difference}")
    if errors:
        ray.shutdown()
        raise ValueError(
            "these nodes differ from the driver's node:\n  "
            + "\n  ".join(errors)
            + "\nUse one environment and equal files on all nodes, and set trainer.output_dir to a shared folder."
        )


def inspect_node(paths: Mapping[str, str], base_folder: str) -> dict[str, str]:
    """Return the versions of Python and libraries on this node, and the number and size of the files at each of
    `paths`. paths: configuration key -> path, absolute or relative to `base_folder`."""
    versions = {name: (find_version(name) or "none").split("+")[0] for name in COMPARED_LIBRARIES}  # drops +cpu
    code = {"Python": platform.python_version(), "alphaapollo": compute_code_version()}
    return code | versions | {f"{key}={path}": _describe_files(Path(base_folder, path)) for key, path in paths.items()}


@cache
def compute_code_version() -> str:
    """Return the version of alphaapollo and a digest of its files, because checkouts of one version may differ."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return f"{__version__} (files {digest.hexdigest()[:8]})"


def describe_node_differences(node: Mapping[str, str], driver: Mapping[str, str]) -> str:
    """Return what differs between the results of inspect_node on a node and on the driver's node, or ""."""
    return ", ".join(f"{name} is {node[name]}, not {value}" for name, value in driver.items() if node[name] != value)


def _describe_files(path: Path) -> str:
    """Return e.g. "3 files of 5,000 bytes": the files at `path`, a file or a folder."""
    if not path.exists():
        return "missing"
    files = [path] if path.is_file() else list(path.iterdir())
    sizes = [file.stat().st_size for file in files if file.suffix in COMPARED_SUFFIXES and file.is_file()]
    return f"{len(sizes)} files of {sum(sizes):,} bytes"
