"""Worker groups whose workers have processes of their own, started concurrently and ended together.

RemoteWorkerGroups       base class of the other two
  ProcessWorkerGroups    processes forked on this machine, without Ray (process_launcher.py)
  RayWorkerGroups        Ray actors on any number of machines (ray_launcher.py)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from alphaapollo.controller.errors import RunStalled, WorkerDied, WorkerFailed
from alphaapollo.controller.remote_ranks import RemoteRanks, WorkerLocation
from alphaapollo.controller.stall_monitor import StallMonitor, StartLimits
from alphaapollo.controller.worker_groups import WorkerGroups, WorkerSpecs
from alphaapollo.engines.weight_sync.transport import assign_weight_writers

if TYPE_CHECKING:
    from alphaapollo.engines.weight_sync.changes import WeightReader

CLOSE_SECONDS = 5.0
R = TypeVar("R", bound=RemoteRanks[Any])


class RemoteWorkerGroups(WorkerGroups, Generic[R]):
    """Worker groups with a process for each worker. Call `start_within` before any other method."""

    def __init__(self, specs: WorkerSpecs):
        super().__init__(specs)
        self.ranks_by_role: dict[str, R] = {}
        engine_roles = ["rollout"] if specs.engine_builder else []
        for role in [*specs.rank_builders, *engine_roles]:
            self.ranks_by_role[role] = self._make_ranks(role)
            self._add_group(role, self.ranks_by_role[role])

    def _make_ranks(self, role: str) -> R:
        raise NotImplementedError

    def _choose_visible_gpus(self, role: str, rank_gpus: Sequence[str]) -> list[dict[str, str]]:
        """Return the environment variables that select the GPUs of each worker of a role. rank_gpus: GPUs of each
        training rank."""
        raise NotImplementedError

    def _make_engine_caller(self) -> Callable[..., None]:
        """Return a function with which the policy worker of rank 0 calls a method of all engines and waits for them."""
        raise NotImplementedError

    def _make_weight_reader(self) -> WeightReader:
        """Return a function that copies weights from rank 0 to an engine's node without training ranks."""
        raise AssertionError("all engines are on this machine")

    async def start(self) -> None:
        """Start the workers of all roles concurrently, because most of the time is spent on importing torch and vLLM.

        vLLM allocates its share of the GPU memory that is free when it starts. On shared GPUs, engines therefore only
        import their libraries until the trainers are built and offloaded."""
        from alphaapollo.rollout.worker import start_rollout_worker
        from alphaapollo.workers.process_group import RankPlacement

        specs, placement, ranks_by_role = self.specs, self.specs.placement, self.ranks_by_role
        located = {role: await ranks.locate_workers() for role, ranks in ranks_by_role.items()}
        engines = located.pop("rollout", [])
        trainers: list[WorkerLocation] = next(iter(located.values()), [])
        gpus, nodes = [rank.gpus for rank in trainers], [rank.node for rank in trainers]
        nodes_to_write = assign_weight_writers(nodes, [engine.node for engine in engines])
        settings = (placement.device, placement.threads, placement.sequence_parallel)
        options_by_role = {}
        if engines and placement.device == "cuda":
            options_by_role = {"policy": {"call_engines": self._make_engine_caller()}}
        starts = []
        for role, build in specs.rank_builders.items():
            address, options = located[role][0].address, options_by_role.get(role, {})
            builders = [
                partial(build, RankPlacement(rank, placement.num_ranks, address, *settings, node), **options)
                for rank, node in enumerate(nodes_to_write)
            ]
            starts.append(ranks_by_role[role].start(builders, self._choose_visible_gpus(role, gpus)))
        if engines:
            assert specs.engine_builder
            engine_builders = []
            for index, engine in enumerate(engines):
                copies_weights = bool(nodes) and engine.node not in nodes  # no training rank of its node writes them
                reader = [self._make_weight_reader()] if copies_weights else []
                build = partial(specs.engine_builder, index, engine.node, *reader)
                engine_builders.append(partial(start_rollout_worker, build, placement.shares_gpus))
            starts.append(ranks_by_role["rollout"].start(engine_builders, self._choose_visible_gpus("rollout", gpus)))
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if engines and placement.shares_gpus:
            await ranks_by_role["rollout"].call(lambda worker: worker.start())

    async def start_within(self, start_timeout: float, logs: str) -> None:
        """Start all workers. If that fails, end them. Raises TimeoutError if the workers have used neither the CPU nor
        the disk for `start_timeout` seconds. logs: end of the message, which names a folder with more logs."""
        limits, required = StartLimits(start_timeout, start_timeout), self.required_service_processes
        try:
            async with StallMonitor(self.ranks, limits, "cpu", lambda _: None, lambda: "", required):
                await self.start()
        except BaseException as error:
            await self.close()
            if not isinstance(error, RunStalled):
                raise
            raise TimeoutError(
                "not all workers started, and none used the CPU or the disk for "
                f"trainer.start_timeout={start_timeout:.0f} s; still starting: {', '.join(error.culprits)}. "
                f"See their logs in the run's logs/{logs}."
            ) from None

    async def close_workers(self) -> None:
        """Shut down the engines, whose cores are separate processes, and end the processes of all workers."""
        with suppress(TimeoutError, WorkerDied, WorkerFailed, ValueError):  # all processes are killed below
            if "rollout" in self.ranks_by_role:
                await asyncio.wait_for(self.engines.close(self.specs.cleanup_folders), timeout=CLOSE_SECONDS)
        for ranks in self.ranks_by_role.values():
            await ranks.close()
