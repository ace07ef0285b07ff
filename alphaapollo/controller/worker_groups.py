"""Worker groups of a command, and their local form: one rank and one engine in this process. Over Ray: ray_launcher.py.

WorkerSpecs    how many workers of each role, and how each is built
WorkerGroups   the started workers, one group per role
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
    """Workers to start. A builder runs in its worker's process.

    ranks: builder of the worker of one training rank by role (policy, critic, reward model, trainer). On GPUs the
        policy's also gets `client`, the client of vLLM's weight transfer.
    engine: takes the engine's index and its node. The worker that it returns is not started yet; None: no engines.
    """

    placement: Placement
    run_id: str = ""  # of the run's processes; empty: no process outlives this one
    ranks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    engine: Callable[[int, str], RolloutWorker] | None = None
    needs_shared_memory: bool = False  # weights reach an engine through its node's shared memory
    samples_in_flight: int = 1  # per engine
    cleanup: list[str] = field(default_factory=list)  # shared-memory folders to remove when the driver ends


class WorkerGroups:
    """Handles to the workers of a command. Attributes of roles that the command does not start do not exist."""

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
        """pid by name of processes besides the workers that the run depends on."""
        return {}

    @property
    def replaces_engines(self) -> bool:
        """Whether a dead engine can be replaced while the other workers keep their state. On GPUs it cannot: the
        trainers hold handles of the engines' memory, or share it with them."""
        return self.specs.placement.device == "cpu"

    async def replace_engine(self, index: int) -> None:
        """Start another engine in place of a dead one, with the weights of the model's folder."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every process that was started, within seconds."""
        raise NotImplementedError


class LocalWorkerGroups(WorkerGroups):
    """One training rank and one engine in this process, without Ray. vLLM's engine core remains a separate process.

    The constructor builds the training rank. `start_engine` follows, where the specs have an engine.
    """

    def __init__(self, specs: WorkerSpecs):
        from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement

        super().__init__(specs)
        at = specs.placement
        placement = RankPlacement(0, 1, NO_RENDEZVOUS, at.device, at.threads, 1, LOCAL_NODE)
        for role, build in specs.ranks.items():
            assert at.num_ranks == 1, "trainer.controller=local has one rank"
            worker = partial(build, placement)
            self._add(role, ThreadRanks(worker, role) if role == "trainer" else LocalRanks(worker()))

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
            with suppress(TimeoutError):  # its core ends with this process, or when a restart ends what is left
                await asyncio.wait_for(self.engines.close(), timeout=CLOSE_SECONDS)
        for ranks in self.ranks:
            if ranks.role != "rollout":
                await ranks.close()
        remove_folders(self.specs.cleanup)


async def start_worker(worker: RolloutWorker) -> RolloutWorker:
    """The rollout worker with its engine running."""
    await worker.start()
    return worker


def remove_folders(folders: list[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
