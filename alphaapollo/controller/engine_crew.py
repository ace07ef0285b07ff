"""A crew of rollout workers alone, which generates with the weights of the model's folder: nobody publishes others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from alphaapollo.config.schema.base import Device
from alphaapollo.controller.crew import started
from alphaapollo.controller.handles import EngineGroup
from alphaapollo.controller.ranks import LocalRanks
from alphaapollo.utils.network import stay_on_loopback

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker


@dataclass(frozen=True)
class EnginePlan:
    """How many engines, where, and how each is built (in its own process)."""

    device: Device
    num_engines: int
    tensor_parallel: int  # GPUs or processes an engine
    build: Callable[[int], RolloutWorker]  # (index of the engine), still to be started
    samples_in_flight: int  # an engine
    cleanup: list[str]  # shared-memory folders that must not outlive the driver


class EngineCrew(Protocol):
    """The workers of a generation."""

    engines: EngineGroup

    async def close(self) -> None:
        """End every process that was started, within seconds."""
        ...


class LocalEngine:
    """One rollout worker in this process (vLLM's engine core stays a process of its own)."""

    def __init__(self, engines: EngineGroup, cleanup: list[str]):
        self.engines, self.cleanup = engines, cleanup

    async def close(self) -> None:
        await asyncio.wait_for(self.engines.close(), timeout=20)
        for folder in self.cleanup:
            shutil.rmtree(folder, ignore_errors=True)


async def launch_local_engine(plan: EnginePlan) -> LocalEngine:
    """Start the one engine; the checks have seen to it that one is wanted."""
    assert plan.num_engines == 1
    stay_on_loopback()
    worker = await started(plan.build(0))
    return LocalEngine(EngineGroup(LocalRanks(worker), plan.samples_in_flight), plan.cleanup)
