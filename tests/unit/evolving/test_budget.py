from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import EvolvingBudget
from alphaapollo.evolving.budget import Budget, EvolutionStopped
from alphaapollo.evolving.pool import Usage

NOTHING = Usage()


def budget(tmp_path: Path, spent: Usage = NOTHING, **limits: Any) -> Budget:
    return Budget(EvolvingBudget(**limits), spent, 0.0, tmp_path / "STOP")


def test_maximum_of_a_call_is_blocked_until_it_is_settled(tmp_path: Path) -> None:
    async def script() -> None:
        own = budget(tmp_path, Usage(1, 30, 0.0), tokens=100)
        await own.admit_call(Usage(1, 65))
        waiting = asyncio.ensure_future(own.admit_call(Usage(1, 20)))
        await asyncio.sleep(0)
        assert not waiting.done(), "a call in flight may return budget"
        await own.settle_call(Usage(1, 65), Usage(1, 25))
        await waiting
        assert own.used == Usage(2, 55)
        await own.settle_call(Usage(1, 20), Usage(1, 20))
        with pytest.raises(EvolutionStopped, match=r"budget\.tokens=100 is spent"):
            await own.admit_call(Usage(1, 26))

    asyncio.run(script())


def test_calls_money_and_seconds(tmp_path: Path) -> None:
    async def script() -> None:
        with pytest.raises(EvolutionStopped, match=r"budget.calls=2 is spent$"):
            await budget(tmp_path, Usage(2, 0, 0.0), calls=2).admit_call(Usage(1))
        with pytest.raises(EvolutionStopped, match=r"budget.money=0.5 is spent"):
            await budget(tmp_path, Usage(2, 0, 0.4), money=0.5).admit_call(Usage(1, 0, 0.11))
        late = Budget(EvolvingBudget(seconds=100.0), Usage(), 100.0, tmp_path / "STOP")
        assert late.seconds >= 100.0
        with pytest.raises(EvolutionStopped, match=r"budget.seconds=100 is spent"):
            await late.admit_call(Usage(1))

    asyncio.run(script())
