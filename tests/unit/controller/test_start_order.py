"""In which order a crew over Ray starts its workers: on shared GPUs the trainers first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alphaapollo.controller.crew import Roles
from alphaapollo.controller.ray_crew import RayCrew
from alphaapollo.controller.ray_ranks import Place
from alphaapollo.controller.worker_counts import Placement


class Worker:
    """A rollout worker that notes its start."""

    def __init__(self, calls: list[str]):
        self.calls = calls

    async def prepare(self) -> None:
        self.calls.append("engine imports")

    async def start(self) -> None:
        self.calls.append("engine starts")


class Ranks:
    """One rank of a role: it takes a moment to build."""

    def __init__(self, role: str, calls: list[str]):
        self.role, self.calls, self.actors = role, calls, []

    async def places(self) -> list[Place]:
        return [Place(1, "node", "127.0.0.1", "0")]

    async def meeting_point(self) -> str:
        return "tcp://127.0.0.1:1"

    async def start(self, factories: list[Any], cleanup: list[str], envs: Any = None) -> None:
        if self.role != "engine":
            await asyncio.sleep(0.01)
            self.calls.append(f"{self.role} built, rests")
            return
        self.worker = await factories[0]()

    async def call(self, function: Any) -> None:
        await function(self.worker)


@pytest.mark.parametrize(("device", "colocate"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_an_engine_on_a_shared_gpu_comes_last(device: Any, colocate: bool) -> None:
    calls: list[str] = []
    crew: Any = object.__new__(RayCrew)
    crew.placement = Placement(
        device=device,
        num_nodes=1,
        ranks_per_node=1,
        num_engines=1,
        tensor_parallel=1,
        colocate=colocate,
        threads=1,
        engine_threads=1,
        critic=True,
        reward_model=True,
    )
    crew.roles = Roles(
        policy=lambda place, client: None,  # type: ignore[arg-type, return-value]
        critic=lambda place: None,  # type: ignore[arg-type, return-value]
        reward_model=lambda place: None,  # type: ignore[arg-type, return-value]
        engine=lambda index, node: Worker(calls),  # type: ignore[arg-type, return-value]
        through_memory=True,
        samples_in_flight=1,
        cleanup=[],
    )
    crew._policy, crew._critic, crew._reward_model, crew._engines = (
        Ranks(role, calls) for role in ("policy", "critic", "reward model", "engine")
    )
    asyncio.run(crew.start())
    trainers = [f"{role} built, rests" for role in ("policy", "critic", "reward model")]
    if device == "cuda" and colocate:
        assert calls == ["engine imports", *trainers, "engine starts"]
    else:
        assert calls == ["engine starts", *trainers]  # beside them
