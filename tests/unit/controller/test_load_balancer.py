from __future__ import annotations

import asyncio

import pytest

from alphaapollo.controller.load_balancer import LoadBalancer


def test_least_loaded_engine_is_chosen_and_ties_take_the_first() -> None:
    async def run() -> list[int]:
        loads = LoadBalancer(3, capacity=8)
        taken = [await loads.acquire_engine(4) for _ in range(4)]
        loads.release_capacity(1, 4)
        loads.release_capacity(0, 4)
        return [*taken, *[await loads.acquire_engine(4) for _ in range(2)]]

    assert asyncio.run(run()) == [0, 1, 2, 0, 1, 0]


def test_requests_without_capacity_wait_in_order() -> None:
    async def run() -> tuple[list[int], list[bool]]:
        loads = LoadBalancer(2, capacity=4)
        for _ in range(2):
            await loads.acquire_engine(4)
        waiting = [asyncio.ensure_future(loads.acquire_engine(4)) for _ in range(2)]
        await asyncio.sleep(0)
        before = [task.done() for task in waiting]
        loads.release_capacity(1, 4)
        first = await waiting[0]
        assert not waiting[1].done()
        loads.release_capacity(0, 4)
        return [first, await waiting[1]], before

    assert asyncio.run(run()) == ([1, 0], [False, False])


def test_a_request_over_the_capacity_waits_for_an_idle_engine() -> None:
    async def run() -> int:
        loads = LoadBalancer(1, capacity=2)
        assert await loads.acquire_engine(5) == 0
        task = asyncio.ensure_future(loads.acquire_engine(5))
        await asyncio.sleep(0)
        assert not task.done()
        loads.release_capacity(0, 5)
        return await task

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize("served", [False, True])
def test_a_cancelled_request_frees_its_capacity(served: bool) -> None:
    async def run() -> int:
        loads = LoadBalancer(1, capacity=4)
        await loads.acquire_engine(4)
        first, second = (asyncio.ensure_future(loads.acquire_engine(4)) for _ in range(2))
        await asyncio.sleep(0)
        if served:
            loads.release_capacity(0, 4)  # the first is assigned, and cancelled before it resumes
        first.cancel()
        if not served:
            loads.release_capacity(0, 4)
        return await asyncio.wait_for(second, 5)

    assert asyncio.run(run()) == 0
