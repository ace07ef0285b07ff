from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import EvolvingBudget
from alphaapollo.evolving.calls import Budget, EvolutionStopped
from alphaapollo.evolving.pool import ModelCall, Pool, Usage


def make_call(tokens: int = 0, money: float = 0.0, time: float = 0.0) -> ModelCall:
    return ModelCall("p0.r0.b0.i0/proposer/turn0", "proposer", "policy", "", 0, time, tokens=tokens, money=money)


def make_budget(pool: Pool, *earlier: ModelCall, **limits: Any) -> Budget:
    for call in earlier:
        pool.append(call)
    return Budget(EvolvingBudget(**limits), pool, pool.path.with_name("STOP"))


def test_maximum_of_a_call_is_blocked_until_it_has_ended(tmp_path: Path) -> None:
    async def script(pool: Pool) -> None:
        budget, started = make_budget(pool, make_call(30), tokens=100), asyncio.Event()

        async def call() -> None:
            async with budget.reserve(Usage(1, 20)):
                started.set()

        async with budget.reserve(Usage(1, 65)):
            waiting = asyncio.ensure_future(call())
            await asyncio.sleep(0)
            assert not started.is_set(), "a call in flight may return budget"
            pool.append(make_call(25))
        await waiting
        with pytest.raises(EvolutionStopped, match=r"budget\.tokens=100 is spent"):
            async with budget.reserve(Usage(1, 46)):
                pass

    with Pool(tmp_path) as pool:
        asyncio.run(script(pool))


@pytest.mark.parametrize(
    ("limit", "value", "usage"), [("calls", 2, Usage(1)), ("money", 0.5, Usage(1, 0, 0.11)), ("seconds", 100, Usage(1))]
)
def test_calls_money_and_seconds(tmp_path: Path, limit: str, value: float, usage: Usage) -> None:
    async def script(pool: Pool) -> None:
        budget = make_budget(pool, make_call(money=0.4), make_call(time=100.0), **{limit: value})
        assert budget.seconds >= 100.0
        with pytest.raises(EvolutionStopped, match=f"budget.{limit}={value:g} is spent"):
            async with budget.reserve(usage):
                pass

    with Pool(tmp_path) as pool:
        asyncio.run(script(pool))
