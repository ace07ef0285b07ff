"""Who computes on GPUs that training ranks and engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.own_loop.compute_turns import ComputeTurns


class FakeSession:
    """Session with engines that sleep while ranks work."""

    def __init__(self) -> None:
        self.publisher, self.calls = SimpleNamespace(engines_hold_weights=True), list[str]()
        self.workers = SimpleNamespace(engines=SimpleNamespace())

    async def hand_over(self, pauses_requests: bool) -> None:
        self.calls.append("sleep")
        self.publisher.engines_hold_weights = False

    async def publish(self, version: int) -> dict[str, float]:
        self.calls.append(f"publish {version}")
        self.publisher.engines_hold_weights = True
        return {}

    def require_publisher(self) -> Any:
        return self.publisher


class FakeAdapters:
    def __init__(self) -> None:
        self.version = 0

    async def use(self, name: str) -> Any:
        return SimpleNamespace(trained_version=None)

    def next_version(self) -> int:
        self.version += 1
        return self.version


def run(test: Callable[[FakeSession, ComputeTurns], Awaitable[None]], shares_gpus: bool = True) -> list[str]:
    session: Any = FakeSession()
    adapters: Any = FakeAdapters()
    asyncio.run(asyncio.wait_for(test(session, ComputeTurns(session, adapters, shares_gpus)), 30))
    calls: list[str] = session.calls
    return calls


async def train(turns: ComputeTurns) -> None:
    async with turns.use_ranks():
        await asyncio.sleep(0)


@pytest.mark.parametrize("shares_gpus", [True, False])
def test_engines_sleep_while_ranks_on_their_gpus_work(shares_gpus: bool) -> None:
    async def test(session: FakeSession, turns: ComputeTurns) -> None:
        await train(turns)
        await train(turns)
        async with turns.use_engines():
            assert session.publisher.engines_hold_weights

    assert run(test, shares_gpus) == (["sleep", "publish 1"] if shares_gpus else [])


def test_waiting_samples_go_on_after_a_verb_that_trains() -> None:
    async def test(session: FakeSession, turns: ComputeTurns) -> None:
        async with turns.sample():
            await train(turns)
            assert session.publisher.engines_hold_weights
            with pytest.raises(ValueError, match="loss"):
                async with turns.use_ranks():
                    raise ValueError("loss")

    assert run(test) == ["sleep", "publish 1", "sleep", "publish 2"]


def test_ranks_wait_while_an_adapter_is_loaded() -> None:
    async def test(session: FakeSession, turns: ComputeTurns) -> None:
        async with turns.use_engines():
            training = asyncio.create_task(train(turns))
            await asyncio.sleep(0.01)
            assert session.calls == []
        await training

    assert run(test) == ["sleep"]
