"""What a run needs of its workers, whoever starts them: Ray (ray_crew.py) or this process (local.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from alphaapollo.controller.handles import CriticGroup, EngineGroup, PolicyGroup, RewardModelGroup
from alphaapollo.controller.ranks import Ranks

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.critic import CriticWorker
    from alphaapollo.workers.policy import PolicyWorker
    from alphaapollo.workers.process_group import RankPlacement
    from alphaapollo.workers.reward_model import RewardModelWorker


@dataclass(frozen=True)
class Roles:
    """How to build the worker of each role; called in its own process, so torch and vLLM are imported there."""

    policy: Callable[[RankPlacement, Any], PolicyWorker]  # (placement, weight-sync client of the engines or None)
    critic: Callable[[RankPlacement], CriticWorker] | None
    reward_model: Callable[[RankPlacement], RewardModelWorker] | None
    engine: Callable[[int, str], RolloutWorker]  # (index of the engine, its node), still to be started
    through_memory: bool  # weights reach an engine through its node's shared memory, from a training rank there
    samples_in_flight: int  # an engine
    cleanup: list[str]  # shared-memory folders that must not outlive the driver


class Trainers(Protocol):
    """The workers that learn."""

    policy: PolicyGroup
    critic: CriticGroup | None


class Crew(Trainers, Protocol):
    """The workers of a run."""

    reward_model: RewardModelGroup | None
    engines: EngineGroup

    @property
    def ranks(self) -> list[Ranks[Any]]:
        """Those of all roles."""
        ...

    @property
    def needed(self) -> dict[str, int]:
        """Processes besides the workers without which nothing goes on: pid by name."""
        ...

    @property
    def replaces_engines(self) -> bool:
        """Whether an engine can be started while everybody else stands."""
        ...

    async def replace_engine(self, index: int) -> None:
        """Another one in the place of one that has died, with the weights of the model's folder."""
        ...

    async def close(self) -> None:
        """End every process that was started, within seconds."""
        ...


async def started(worker: RolloutWorker) -> RolloutWorker:
    """The rollout worker with its engine up."""
    await worker.start()
    return worker
