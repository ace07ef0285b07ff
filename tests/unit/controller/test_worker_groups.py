"""Start order of the workers over Ray: on shared GPUs the trainers start first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alphaapollo.controller.placement import Placement
from alphaapollo.controller.ray_launcher import RayWorkerGroups
from alphaapollo.controller.remote_ranks import WorkerLocation
from alphaapollo.controller.worker_groups import WorkerSpecs


class Worker:
    """A rollout worker that records its start."""

    def __init__(self, calls: list[str]):
        self.calls = calls

    async def preload_libraries(self) -> None:
        self.calls.append("engine imports")

    async def start(self) -> None:
        self.calls.append("engine starts")

    async def close(self) -> None:
        self.calls.append("engine closes")


class FakeRanks:
    """One rank of a role, which takes a moment to build."""

    size = 1

    def __init__(self, role: str, calls: list[str]):
        self.role, self.calls, self.call_engines = role, calls, print

    async def locate_workers(self) -> list[WorkerLocation]:
        return [WorkerLocation(1, "node", "127.0.0.1", "0")]

    async def start(self, builders: list[Any], environments: Any) -> None:
        if self.role != "rollout":
            await asyncio.sleep(0.01)
            self.calls.append(f"{self.role} built")
            return
        self.worker = await builders[0]()

    async def call(self, function: Any) -> None:
        await function(self.worker)


def make_specs(calls: list[str], **placement: Any) -> WorkerSpecs:
    def build(*arguments: Any, **extra: Any) -> Any:
        return None

    return WorkerSpecs(
        placement=Placement(ranks_per_node=1, num_engines=1, **placement),
        rank_builders=dict.fromkeys(("policy", "critic", "reward model"), build),
        engine_builder=lambda index, node: Worker(calls),  # type: ignore[arg-type, return-value]
    )


@pytest.mark.parametrize(("device", "colocate"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_an_engine_on_a_shared_gpu_starts_last(device: Any, colocate: bool) -> None:
    calls: list[str] = []
    groups: Any = object.__new__(RayWorkerGroups)
    groups.specs = make_specs(calls, device=device, colocate=colocate)
    trainers = ("policy", "critic", "reward model")
    groups.ranks_by_role = {role: FakeRanks(role, calls) for role in (*trainers, "rollout")}
    asyncio.run(groups.start())
    built = [f"{role} built" for role in trainers]
    if device == "cuda" and colocate:
        assert calls == ["engine imports", *built, "engine starts"]
    else:
        assert calls == ["engine starts", *built]  # concurrently
