"""Worker groups whose workers are processes of this machine, without Ray (trainer.controller=local with several
workers). The training ranks use the first GPUs. Engines share these GPUs, or use the next GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from alphaapollo.controller.placement import list_visible_gpus
from alphaapollo.controller.process_ranks import ProcessRanks, call_engines_of_run
from alphaapollo.controller.remote_groups import RemoteWorkerGroups
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.processes.fork_server import start_fork_server
from alphaapollo.processes.network import restrict_network_to_loopback
from alphaapollo.processes.watchdog import remove_paths

PRELOAD_MODULE = "alphaapollo.controller.preload"
WORKER_MODULES = ("alphaapollo.workers.builders", "alphaapollo.rollout.worker")


async def launch_worker_processes(specs: WorkerSpecs, start_timeout: float) -> ProcessWorkerGroups:
    """Start all workers concurrently. Arguments and errors are those of launcher.launch_workers."""
    restrict_network_to_loopback()
    start_fork_server(PRELOAD_MODULE, WORKER_MODULES)
    groups = ProcessWorkerGroups(specs)
    await groups.start_within(start_timeout, "")
    return groups


class ProcessWorkerGroups(RemoteWorkerGroups[ProcessRanks[object]]):
    """Worker groups whose workers are processes forked on this machine."""

    def _make_ranks(self, role: str) -> ProcessRanks[object]:
        return ProcessRanks(role, self.specs.placement.count_workers(role), self._call_engines)

    def _call_engines(self, method: str, *arguments: object) -> None:
        self.ranks_by_role["rollout"].call_engines(method, *arguments)

    def _choose_visible_gpus(self, role: str, rank_gpus: Sequence[str]) -> list[dict[str, str]]:
        placement = self.specs.placement
        return placement.assign_gpus(role, list_visible_gpus(placement.num_gpus))

    def _make_engine_caller(self) -> Callable[..., None]:
        return call_engines_of_run

    async def close(self) -> None:
        await self.close_workers()
        remove_paths(map(Path, self.specs.cleanup_folders))
