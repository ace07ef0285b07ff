"""Worker groups of a command, and their implementation in one process. ray_launcher.py implements them over Ray.

WorkerSpecs          number of workers of each role, and functions that build them
WorkerGroups         started workers, one group per role
LocalWorkerGroups    one training rank and one engine in this process
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from alphaapollo.controller.handles import CriticGroup, EngineGroup, FinetuningGroup, PolicyGroup, RewardModelGroup
from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ranks import LocalRanks, Ranks, ThreadRanks
from alphaapollo.utils.network import listen_on_loopback_only

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker

LOCAL_NODE = "here"
CLOSE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class WorkerSpecs:
    """Specification of the workers to start. A builder is a function that runs in its worker's process.

    ranks: role (policy, critic, reward model, trainer) -> builder of the worker of one training rank. On GPUs the
        policy's builder also receives `client`, the client of vLLM's weight transfer.
    engine: builder of a rollout worker from the engine's index and its node, without starting it; None: no engines.
    """

    placement: Placement
    run_id: str = ""  # id of the run's processes; "": no process can outlive this one
    ranks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    engine: Callable[[int, str], RolloutWorker] | None = None
    needs_shared_memory: bool = False  # weights reach an engine through its node's shared memory
    samples_in_flight: int = 1  # per engine
    cleanup: list[str] = field(default_factory=list)  # shared-memory folders to remove when the driver ends


class WorkerGroups:
    """Handles to the workers of a command. A role that the command does not start has no attribute, or None."""

    policy: PolicyGroup
    trainer: FinetuningGroup[Any]
    engines: EngineGroup
    critic: CriticGroup | None = None
    reward_model: RewardModelGroup | None = None

    def __init__(self, specs: WorkerSpecs):
        self.specs = specs
        self.ranks: list[Ranks[Any]] = []

    def _add(self, role: str, ranks: Ranks[Any]) -> None:
        self.ranks.append(ranks)
        shared = self.specs.placement.sequence_parallel
        match role:
            case "policy":
                self.policy = PolicyGroup(ranks, shared)
            case "critic":
                self.critic = CriticGroup(ranks, shared)
            case "reward model":
                self.reward_model = RewardModelGroup(ranks, shared)
            case "trainer":
                self.trainer = FinetuningGroup(ranks, shared)
            case "rollout":
                self.engines = EngineGroup(ranks, self.specs.samples_in_flight)

    @property
    def required_processes(self) -> Mapping[str, int]:
        """Return name -> pid of the processes, besides the workers, that the run depends on."""
        return {}

    @property
    def replaces_engines(self) -> bool:
        """Whether a dead engine can be replaced while all other workers keep their state. On GPUs it cannot: the
        trainers hold handles to the engines' memory, or share the GPUs with the engines."""
        return self.specs.placement.device == "cpu"

    async def replace_engine(self, index: int) -> None:
        """Start a new engine in place of a dead engine. It has the weights in the model's folder."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every process that was started, within seconds."""
        raise NotImplementedError


class LocalWorkerGroups(WorkerGroups):
    """One training rank and one engine in this process, without Ray. vLLM's engine core remains a separate process. The
    constructor builds the training rank. If the specs have an engine, call `start_engine` next."""

    def __init__(self, specs: WorkerSpecs):
        from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement

        super().__init__(specs)
        placement = specs.placement
        rank_placement = RankPlacement(0, 1, NO_RENDEZVOUS, placement.device, placement.threads, 1, LOCAL_NODE)
        for role, build in specs.ranks.items():
            assert placement.num_ranks == 1, "trainer.controller=local has one rank"
            build_worker = partial(build, rank_placement)
            self._add(role, ThreadRanks(build_worker, role) if role == "trainer" else LocalRanks(build_worker()))

    async def start_engine(self) -> None:
        assert self.specs.placement.num_engines == 1, "trainer.controller=local has one engine"
        listen_on_loopback_only()
        self._add("rollout", LocalRanks(await self._make_engine(0)))

    async def _make_engine(self, index: int) -> RolloutWorker:
        assert self.specs.engine
        return await start_worker(self.specs.engine(index, LOCAL_NODE))

    async def replace_engine(self, index: int) -> None:
        ranks = self.engines.ranks
        assert isinstance(ranks, LocalRanks)
        await ranks.close()
        ranks.worker = await self._make_engine(index)

    async def close(self) -> None:
        if hasattr(self, "engines"):
            with suppress(TimeoutError):  # the engine core ends with this process, or a restart kills it
                await asyncio.wait_for(self.engines.close(), timeout=CLOSE_SECONDS)
        for ranks in self.ranks:
            if ranks.role != "rollout":
                await ranks.close()
        remove_folders(self.specs.cleanup)


async def start_worker(worker: RolloutWorker) -> RolloutWorker:
    """Start the worker's engine and return the worker."""
    await worker.start()
    return worker


def remove_folders(folders: list[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
