from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from alphaapollo.controller.load_balancer import LoadBalancer
from tests.unit.event_loop import in_event_loop


async def hold(loads: LoadBalancer, num_samples: int) -> tuple[int, AsyncExitStack]:
    """Reserve an engine. Returns its index, and a stack whose `aclose` frees it."""
    stack = AsyncExitStack()
    return await stack.enter_async_context(loads.reserve_engine(num_samples)), stack


@in_event_loop
async def test_least_loaded_engine_is_chosen_and_ties_take_the_first() -> None:
    loads = LoadBalancer(3, capacity=8)
    held = [await hold(loads, 4) for _ in range(4)]
    for index in (1, 0):
        await held[index][1].aclose()
    held += [await hold(loads, 4) for _ in range(2)]
    assert [engine for engine, _ in held] == [0, 1, 2, 0, 1, 0]


@in_event_loop
async def test_requests_without_capacity_wait_in_order() -> None:
    loads = LoadBalancer(2, capacity=4)
    held = [await hold(loads, 4) for _ in range(2)]
    waiting = [asyncio.ensure_future(hold(loads, 4)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await held[1][1].aclose()
    assert (await waiting[0])[0] == 1 and not waiting[1].done()
    await held[0][1].aclose()
    assert (await waiting[1])[0] == 0


@in_event_loop
async def test_a_request_over_the_capacity_waits_for_an_idle_engine() -> None:
    loads = LoadBalancer(1, capacity=2)
    engine, held = await hold(loads, 5)
    assert engine == 0
    task = asyncio.ensure_future(hold(loads, 5))
    await asyncio.sleep(0)
    assert not task.done()
    await held.aclose()
    assert (await task)[0] == 0


@pytest.mark.parametrize("served", [False, True])
@in_event_loop
async def test_a_cancelled_request_frees_its_capacity(served: bool) -> None:
    loads = LoadBalancer(1, capacity=4)
    _, held = await hold(loads, 4)
    first, second = (asyncio.ensure_future(hold(loads, 4)) for _ in range(2))
    await asyncio.sleep(0)
    if served:
        await held.aclose()  # the first is assigned, and cancelled before it resumes
    first.cancel()
    if not served:
        await held.aclose()
    assert (await asyncio.wait_for(second, 5))[0] == 0
