"""Start of the workers of a command, in this process or over Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from alphaapollo.controller.worker_groups import LocalWorkerGroups, WorkerGroups, WorkerSpecs
from alphaapollo.utils.temp_folder import register_cleanup
from alphaapollo.utils.watchdog import start_reaper


async def launch_workers(
    specs: WorkerSpecs, controller: Literal["local", "ray"], timeout: float, paths: Mapping[str, str]
) -> WorkerGroups:
    """Start all workers, and a process that ends them if this one is killed.

    Args:
        timeout: seconds (trainer.start_timeout); Ray only.
        paths: key -> path of what every node of a joined cluster must have.

    Raises:
        ValueError: the workers cannot be placed, or the nodes differ.
        TimeoutError: not all workers have started in time.
    """
    if specs.run_id:
        start_reaper(specs.run_id, specs.cleanup)
    register_cleanup(specs.cleanup)
    if controller == "local":
        groups = LocalWorkerGroups(specs)
        if specs.engine:
            await groups.start_engine()
        return groups
    from alphaapollo.controller.ray_cluster import start_local_cluster
    from alphaapollo.controller.ray_launcher import launch_ray

    joined = bool(os.environ.get("RAY_ADDRESS"))  # input_checks.find_machine has connected
    if not joined:
        start_local_cluster()
    return await launch_ray(specs, timeout, paths if joined else None)
