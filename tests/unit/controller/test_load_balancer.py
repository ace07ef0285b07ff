from __future__ import annotations

import asyncio

import pytest

from alphaapollo.controller.load_balancer import EngineChoice


def test_the_least_loaded_engine_comes_first_and_the_first_of_equals() -> None:
    async def play() -> list[int]:
        loads = EngineChoice(3, room=8)
        taken = [await loads.take(4) for _ in range(4)]
        loads.give_back(1, 4)
        loads.give_back(0, 4)
        return [*taken, *[await loads.take(4) for _ in range(2)]]

    assert asyncio.run(play()) == [0, 1, 2, 0, 1, 0]


def test_who_finds_no_room_waits_in_line() -> None:
    async def play() -> tuple[list[int], list[bool]]:
        loads = EngineChoice(2, room=4)
        for _ in range(2):
            await loads.take(4)
        waiting = [asyncio.ensure_future(loads.take(4)) for _ in range(2)]
        await asyncio.sleep(0)
        before = [task.done() for task in waiting]
        loads.give_back(1, 4)
        first = await waiting[0]
        assert not waiting[1].done()
        loads.give_back(0, 4)
        return [first, await waiting[1]], before

    assert asyncio.run(play()) == ([1, 0], [False, False])


def test_a_request_over_the_room_waits_for_an_idle_engine() -> None:
    async def play() -> int:
        loads = EngineChoice(1, room=2)
        assert await loads.take(5) == 0
        task = asyncio.ensure_future(loads.take(5))
        await asyncio.sleep(0)
        assert not task.done()
        loads.give_back(0, 5)
        return await task

    assert asyncio.run(play()) == 0


@pytest.mark.parametrize("served", [False, True])
def test_a_cancelled_request_leaves_its_place_to_the_next(served: bool) -> None:
    async def play() -> int:
        loads = EngineChoice(1, room=4)
        await loads.take(4)
        first, second = (asyncio.ensure_future(loads.take(4)) for _ in range(2))
        await asyncio.sleep(0)
        if served:
            loads.give_back(0, 4)  # the first is served, and is cancelled before it hears of it
        first.cancel()
        if not served:
            loads.give_back(0, 4)
        return await asyncio.wait_for(second, 5)

    assert asyncio.run(play()) == 0
