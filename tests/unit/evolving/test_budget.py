from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Limits
from alphaapollo.evolving.budget import Budget, Halt
from alphaapollo.evolving.pool import Spent

NOTHING = Spent()


def budget(tmp_path: Path, spent: Spent = NOTHING, **limits: Any) -> Budget:
    return Budget(Limits(**limits), spent, 0.0, tmp_path / "STOP", clock=lambda: 0.0)


def test_a_promise_is_room_until_it_is_settled(tmp_path: Path) -> None:
    async def script() -> None:
        own = budget(tmp_path, Spent(1, 30, 0.0), tokens=100, reserve=0.1)
        await own.admit(Spent(1, 60))  # 90 of the 90 that are not kept
        waiting = asyncio.ensure_future(own.admit(Spent(1, 20)))
        await asyncio.sleep(0)
        assert not waiting.done(), "something in flight may give back"
        await own.settle(Spent(1, 60), Spent(1, 25))
        await waiting
        assert own.spent == Spent(2, 55)
        await own.settle(Spent(1, 20), Spent(1, 20))
        with pytest.raises(Halt, match=r"budget.tokens=100 is spent, but for the 10% that are kept"):
            await own.admit(Spent(1, 16))
        own.open_reserve()
        await own.admit(Spent(1, 16))

    asyncio.run(script())


def test_calls_money_and_seconds(tmp_path: Path) -> None:
    async def script() -> None:
        with pytest.raises(Halt, match=r"budget.calls=2 is spent$"):
            await budget(tmp_path, Spent(2, 0, 0.0), calls=2, reserve=0.0).admit(Spent(1))
        with pytest.raises(Halt, match=r"budget.money=0.5 is spent"):
            await budget(tmp_path, Spent(2, 0, 0.4), money=0.5, reserve=0.0).admit(Spent(1, 0, 0.11))
        late = Budget(Limits(seconds=100.0), Spent(), 91.0, tmp_path / "STOP", clock=lambda: 7.0)
        assert late.seconds == 91.0 and late.seconds_left == pytest.approx(-1.0)
        with pytest.raises(Halt, match=r"budget.seconds=100 is spent"):
            await late.admit(Spent(1))
        late.open_reserve()
        await late.admit(Spent(1))

    asyncio.run(script())


def test_the_stop_file(tmp_path: Path) -> None:
    own = budget(tmp_path)
    (tmp_path / "STOP").touch()
    with pytest.raises(Halt, match="STOP is there"):
        asyncio.run(own.admit(Spent(1)))
    own.open_reserve()
    assert not (tmp_path / "STOP").exists()
