import asyncio

import pytest

from alphaapollo.utils.time_limit import Clock, queueing, start_clocks, stop_clocks
from tests.unit.virtual_time import run


def test_only_its_own_blocks_count():
    async def play() -> float:
        clock = Clock(10.0)
        async with clock.running():
            await asyncio.sleep(4)
        await asyncio.sleep(100)  # between the blocks
        async with clock.running():
            await asyncio.sleep(5)
        return clock.left

    assert run(play()) == 1.0


def test_all_blocks_share_the_limit():
    async def play() -> float:
        clock = Clock(10.0)
        async with clock.running():
            await asyncio.sleep(7)
        try:
            async with clock.running():
                await asyncio.sleep(7)
        except TimeoutError:
            return asyncio.get_running_loop().time()
        return -1.0

    assert run(play()) == 10.0


def test_a_queue_does_not_count_wherever_it_is():
    async def wait() -> None:
        with queueing():
            await asyncio.sleep(100)

    async def play() -> float:
        clock = Clock(10.0)
        async with clock.running():
            await asyncio.sleep(1)
            await wait()
            await asyncio.create_task(wait())  # a task that was started in the block
            await asyncio.gather(wait(), wait())
            await asyncio.sleep(2)
        return clock.left

    assert run(play()) == 7.0


def test_what_comes_after_the_queue_counts():
    async def play() -> float:
        clock = Clock(10.0)
        async with clock.running():
            with queueing():
                await asyncio.sleep(100)
            await asyncio.sleep(11)
        return clock.left

    with pytest.raises(TimeoutError):
        run(play())


def test_a_time_out_inside_a_queue_leaves_as_itself():
    async def play() -> None:
        async with Clock(10.0).running():
            with queueing():
                async with asyncio.timeout(20):
                    await asyncio.sleep(100)

    with pytest.raises(TimeoutError):
        run(play())


def test_without_a_clock_a_queue_is_nothing():
    with queueing():
        pass
    assert run(asyncio.sleep(0, 3)) == 3


def test_stopped_clocks_stand_still_those_that_begin_then_too():
    async def play() -> tuple[float, float]:
        first, second = Clock(10.0), Clock(10.0)

        async def stop() -> None:
            await asyncio.sleep(4)
            stop_clocks()
            await asyncio.sleep(100)
            start_clocks()

        async def work(clock: Clock, seconds: float) -> None:
            async with clock.running():
                await asyncio.sleep(seconds)

        stopping = asyncio.create_task(stop())
        begun = asyncio.create_task(work(first, 106))
        await asyncio.sleep(50)
        await work(second, 57)
        await asyncio.gather(stopping, begun)
        return first.left, second.left

    assert run(play()) == (4.0, 7.0)
