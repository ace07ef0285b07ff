"""Start the workers of a command: in this process, as processes of this machine, or over Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from alphaapollo.controller.worker_groups import LocalWorkerGroups, WorkerGroups, WorkerSpecs
from alphaapollo.processes.allocator import ONE_ARENA
from alphaapollo.processes.watchdog import start_reaper


async def launch_workers(
    specs: WorkerSpecs, controller: Literal["local", "ray"], start_timeout: float, required_paths: Mapping[str, str]
) -> WorkerGroups:
    """Start all workers, and a reaper process that ends them if this process is killed.

    Args:
        start_timeout: seconds that workers in other processes may be idle while they start (trainer.start_timeout).
        required_paths: configuration key -> path that must exist on every node of a joined cluster.

    Raises ValueError if the cluster is too small for the workers, or if its nodes have different versions or files.
    Raises TimeoutError if a worker did not start in time.
    """
    if specs.run_id:
        start_reaper(specs.run_id, specs.cleanup_folders)
    if controller == "local":
        if not specs.placement.fits_in_one_process:
            from alphaapollo.controller.process_launcher import launch_worker_processes

            return await launch_worker_processes(specs, start_timeout)
        groups = LocalWorkerGroups(specs)
        if specs.engine_builder:
            await groups.start_engine()
        return groups
    from alphaapollo.controller.ray_cluster import start_local_cluster
    from alphaapollo.controller.ray_launcher import launch_ray_workers

    has_joined_cluster = bool(os.environ.get("RAY_ADDRESS"))  # in launch/inputs.py
    if not has_joined_cluster:
        if specs.placement.device == "cpu":
            os.environ.update(ONE_ARENA)  # for Ray's processes, whose workers compute in threads
        start_local_cluster()
    return await launch_ray_workers(specs, start_timeout, required_paths if has_joined_cluster else None)
