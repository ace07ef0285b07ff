"""A process without which nothing goes on: its death is told at once, and before what it has led to."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from alphaapollo.controller.health.process_monitor import ProcessWatch
from alphaapollo.controller.ranks import WorkerDied


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_its_death_ends_the_block(other: subprocess.Popen[bytes]) -> None:
    told: list[str] = []

    async def main() -> None:
        async with ProcessWatch({"Ray's raylet": other.pid}, told.append) as watch:
            assert not watch.gave_up()
            other.kill()
            try:
                await asyncio.sleep(600)
            finally:
                assert watch.gave_up()

    with pytest.raises(WorkerDied, match=rf"^Ray's raylet on this machine \(pid {other.pid}\) died$") as caught:
        asyncio.run(main())
    assert caught.value.who == "Ray" and told == [str(caught.value)]


def test_who_feels_it_first_is_not_blamed(other: subprocess.Popen[bytes]) -> None:
    async def main() -> None:
        async with ProcessWatch({"Ray's GCS": other.pid}, print):
            other.kill()
            other.wait()
            raise WorkerDied("the policy worker died: its owner's node has crashed", "policy")

    with pytest.raises(WorkerDied, match=r"^Ray's GCS on this machine"):
        asyncio.run(main())


def test_the_living_change_nothing(other: subprocess.Popen[bytes]) -> None:
    async def main(error: BaseException | None = None) -> str:
        async with ProcessWatch({"Ray's GCS": other.pid, "Ray's raylet": other.pid}, print):
            if error:
                raise error
        return "done"

    assert asyncio.run(main()) == "done"
    with pytest.raises(ValueError, match="a key"):
        asyncio.run(main(ValueError("a key")))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main(asyncio.CancelledError()))


def test_its_end_after_the_block_is_nobodys_business(other: subprocess.Popen[bytes]) -> None:
    async def main() -> str:
        async with ProcessWatch({"Ray's raylet": other.pid}, print):
            pass
        other.kill()
        other.wait()
        await asyncio.sleep(0.05)
        return "done"

    assert asyncio.run(main()) == "done"
