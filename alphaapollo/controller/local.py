"""The crew in one process, without Ray: for tests and debugging. Same handles, same worker classes, same numbers."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from alphaapollo.controller.crew import Roles, started
from alphaapollo.controller.handles import CriticGroup, EngineGroup, PolicyGroup, RewardModelGroup
from alphaapollo.controller.ranks import LocalRanks, Ranks
from alphaapollo.controller.worker_counts import Placement
from alphaapollo.utils.network import stay_on_loopback

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.process_group import RankPlacement

HERE = "here"  # the one node


class LocalCrew:
    """One training rank and one engine in this process (vLLM's engine core stays a process of its own)."""

    policy: PolicyGroup
    critic: CriticGroup | None
    reward_model: RewardModelGroup | None

    def __init__(
        self,
        policy: PolicyGroup,
        critic: CriticGroup | None,
        reward_model: RewardModelGroup | None,
        engine: LocalRanks[RolloutWorker],
        placement: Placement,
        roles: Roles,
    ):
        self.policy, self.critic, self.reward_model = policy, critic, reward_model
        self.engines = EngineGroup(engine, roles.samples_in_flight)
        self.replaces_engines = placement.device == "cpu"
        self._engine, self._roles = engine, roles

    @property
    def ranks(self) -> list[Ranks[Any]]:
        groups = (self.policy, self.critic, self.reward_model, self.engines)
        return [group.ranks for group in groups if group]

    @property
    def needed(self) -> dict[str, int]:
        return {}

    async def replace_engine(self, index: int) -> None:
        await self._engine.close()
        self._engine.worker = await started(self._roles.engine(index, HERE))

    async def close(self) -> None:
        with suppress(TimeoutError):  # its core ends with this process, or when a restart sees that nothing is left
            await asyncio.wait_for(self.engines.close(), timeout=20)
        await self.policy.close()
        for group in (self.critic, self.reward_model):
            if group:
                await group.close()
        for folder in self._roles.cleanup:
            shutil.rmtree(folder, ignore_errors=True)


async def launch_local(placement: Placement, roles: Roles) -> LocalCrew:
    """Build the workers one after the other. Needs one rank and one engine: the checks see to it."""
    assert placement.num_ranks == 1 and placement.num_engines == 1
    stay_on_loopback()
    place = _only_rank(placement)
    policy, critic = launch_trainers(placement, roles)
    reward_model = RewardModelGroup(LocalRanks(roles.reward_model(place))) if roles.reward_model else None
    engine = LocalRanks(await started(roles.engine(0, HERE)))
    return LocalCrew(policy, critic, reward_model, engine, placement, roles)


def launch_trainers(placement: Placement, roles: Roles) -> tuple[PolicyGroup, CriticGroup | None]:
    """Build those that learn, alone."""
    place = _only_rank(placement)
    policy = PolicyGroup(LocalRanks(roles.policy(place, None)))
    return policy, CriticGroup(LocalRanks(roles.critic(place))) if roles.critic else None


def _only_rank(placement: Placement) -> RankPlacement:
    from alphaapollo.workers.process_group import ALONE, RankPlacement

    return RankPlacement(0, 1, ALONE, placement.device, placement.threads, feeds=HERE)
