import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from alphaapollo.processes.time_limit import (
    TimeLimit,
    exclude_from_time_limit,
    pause_all_time_limits,
)
from tests.unit.virtual_time import run


async def wait(seconds: float = 100.0) -> None:
    with exclude_from_time_limit():
        await asyncio.sleep(seconds)


def test_only_running_blocks_count_and_share_the_limit():
    async def play() -> float:
        limit = TimeLimit(10.0)
        async with limit.count_time():
            await asyncio.sleep(4)
        await asyncio.sleep(100)  # between the blocks
        assert limit.seconds_left == 6.0
        with pytest.raises(TimeoutError):
            async with limit.count_time():
                await asyncio.sleep(7)
        return asyncio.get_running_loop().time()

    assert run(play()) == 110.0


def test_waiting_is_excluded_in_nested_calls_and_tasks():
    async def play() -> float:
        limit = TimeLimit(10.0)
        async with limit.count_time():
            await asyncio.sleep(1)
            await wait()
            await asyncio.create_task(wait())  # a task that was started in the block
            await asyncio.gather(wait(), wait())
            await asyncio.sleep(2)
        return limit.seconds_left

    assert run(play()) == 7.0


def test_time_after_waiting_and_other_timeouts_while_waiting_count():
    async def play(block: Callable[[], Coroutine[Any, Any, None]]) -> float:
        with pytest.raises(TimeoutError):
            async with TimeLimit(10.0).count_time():
                await block()
        return asyncio.get_running_loop().time()

    async def wait_and_work() -> None:
        await wait()
        await asyncio.sleep(11)

    async def wait_with_timeout() -> None:
        async with asyncio.timeout(20):
            await wait()

    assert (run(play(wait_and_work)), run(play(wait_with_timeout))) == (110.0, 20.0)


def test_paused_limits_do_not_count():
    async def play() -> tuple[float, float]:
        first, second = TimeLimit(10.0), TimeLimit(10.0)

        async def stop() -> None:
            await asyncio.sleep(4)
            pause_all_time_limits()
            await asyncio.sleep(100)
            pause_all_time_limits(False)

        async def work(limit: TimeLimit, seconds: float) -> None:
            async with limit.count_time():
                await asyncio.sleep(seconds)

        stopping = asyncio.create_task(stop())
        begun = asyncio.create_task(work(first, 106))
        await asyncio.sleep(50)
        await work(second, 57)
        await asyncio.gather(stopping, begun)
        return first.seconds_left, second.seconds_left

    assert run(play()) == (4.0, 7.0)
