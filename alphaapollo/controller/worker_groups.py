"""Worker groups of a command, and their implementation in one process. remote_groups.py implements them with a process
for each worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.handles import CriticGroup, FinetuningGroup, PolicyGroup, RewardModelGroup
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ranks import LocalRanks, Ranks
from alphaapollo.processes.allocator import share_main_arena
from alphaapollo.processes.network import restrict_network_to_loopback
from alphaapollo.processes.watchdog import remove_paths

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker

LOCAL_NODE = "here"
CLOSE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class WorkerSpecs:
    """Specification of the workers to start. Each builder is a function that runs in the process of its worker.

    rank_builders: role (policy, critic, reward model, trainer) -> function that builds the worker of a training rank
        from its RankPlacement. On GPUs the policy's builder also gets `call_engines`, for the weight transfer.
    engine_builder: builds a rollout worker from the engine's index, its node and, on a node without training ranks, its
        WeightReader, without starting it; None: no engines.
    """

    placement: Placement
    run_id: str = ""  # id of the run's processes; "": no process can outlive this one
    rank_builders: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    engine_builder: Callable[..., RolloutWorker] | None = None
    samples_in_flight: int = 1  # per engine
    cleanup_folders: list[str] = field(default_factory=list)  # in shared memory, removed when the driver ends


class WorkerGroups:
    """Handles to the workers of a command, one per role. Roles that the command does not start are None or not set."""

    policy: PolicyGroup
    trainer: FinetuningGroup[Any]
    engines: EngineGroup
    critic: CriticGroup | None = None
    reward_model: RewardModelGroup | None = None

    def __init__(self, specs: WorkerSpecs):
        self.specs = specs
        self.ranks: list[Ranks[Any]] = []
        self.required_service_processes: Mapping[str, int] = {}
        """Name -> pid of the processes besides the workers that the run depends on, e.g. Ray's raylet."""

    def _add_group(self, role: str, ranks: Ranks[Any]) -> None:
        self.ranks.append(ranks)
        sequence_parallel = self.specs.placement.sequence_parallel
        match role:
            case "policy":
                self.policy = PolicyGroup(ranks, sequence_parallel)
            case "critic":
                self.critic = CriticGroup(ranks, sequence_parallel)
            case "reward model":
                self.reward_model = RewardModelGroup(ranks, sequence_parallel)
            case "trainer":
                self.trainer = FinetuningGroup(ranks, sequence_parallel)
            case "rollout":
                shares_gpus = self.specs.placement.shares_gpus
                self.engines = EngineGroup(ranks, self.specs.samples_in_flight, shares_gpus)

    async def close(self) -> None:
        """End all processes that the worker groups have started. Takes only seconds."""
        raise NotImplementedError


class LocalWorkerGroups(WorkerGroups):
    """One training rank and one engine in this process, without Ray. The constructor builds the training rank. If the
    specs have an engine, call `start_engine` next. vLLM's engine core remains a separate process."""

    def __init__(self, specs: WorkerSpecs):
        from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement

        super().__init__(specs)
        placement = specs.placement
        rank_placement = RankPlacement(0, 1, NO_RENDEZVOUS, placement.device, placement.threads, 1, LOCAL_NODE)
        share_main_arena()  # with the thread in which a worker may compute
        self._rollout = specs.engine_builder(0, LOCAL_NODE) if specs.engine_builder else None
        if self._rollout:
            self._rollout.engine.start_other_imports()
        for role, build in specs.rank_builders.items():
            thread = ThreadPoolExecutor(1, role) if role == "trainer" else None
            worker = thread.submit(build, rank_placement).result() if thread else build(rank_placement)
            self._add_group(role, LocalRanks(worker, role, thread))

    async def start_engine(self) -> None:
        restrict_network_to_loopback()
        assert self._rollout
        await self._rollout.start()
        self._add_group("rollout", LocalRanks(self._rollout, "rollout"))

    async def close(self) -> None:
        if hasattr(self, "engines"):
            with suppress(TimeoutError):  # the engine core ends with this process, or a restart kills it
                await asyncio.wait_for(self.engines.close(), timeout=CLOSE_SECONDS)
        for ranks in self.ranks:
            if ranks.role != "rollout":
                await ranks.close()
        remove_paths(map(Path, self.specs.cleanup_folders))
