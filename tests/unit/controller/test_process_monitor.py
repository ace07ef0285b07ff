"""The death of a required process is reported at once, before the errors that follow from it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from alphaapollo.controller.ranks import CANCELLED_BY_MONITOR, WorkerDied
from alphaapollo.controller.stall_monitor import monitor_processes


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_a_death_ends_the_block(other: subprocess.Popen[bytes]) -> None:
    lines: list[str] = []

    async def main() -> None:
        async with monitor_processes({"Ray's raylet": other.pid}, lines.append):
            other.kill()
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError as error:
                assert error.args == (CANCELLED_BY_MONITOR,)
                raise

    with pytest.raises(WorkerDied, match=rf"Ray's raylet .*\(pid {other.pid}\)") as caught:
        asyncio.run(main())
    assert caught.value.role == "Ray" and lines == [str(caught.value)]


def test_first_failure_of_a_worker_is_not_named(other: subprocess.Popen[bytes]) -> None:
    async def main() -> None:
        async with monitor_processes({"Ray's GCS": other.pid}, print):
            other.kill()
            other.wait()
            raise WorkerDied("the policy worker died: its owner's node has crashed", "policy")

    with pytest.raises(WorkerDied, match=r"^Ray's GCS"):
        asyncio.run(main())


def test_running_processes_change_nothing(other: subprocess.Popen[bytes]) -> None:
    async def main(error: BaseException | None = None) -> str:
        async with monitor_processes({"Ray's GCS": other.pid, "Ray's raylet": other.pid}, print):
            if error:
                raise error
        return "done"

    assert asyncio.run(main()) == "done"
    with pytest.raises(ValueError, match="a key"):
        asyncio.run(main(ValueError("a key")))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main(asyncio.CancelledError()))


def test_a_death_after_the_block_is_ignored(other: subprocess.Popen[bytes]) -> None:
    async def main() -> str:
        async with monitor_processes({"Ray's raylet": other.pid}, print):
            pass
        other.kill()
        other.wait()
        await asyncio.sleep(0.05)
        return "done"

    assert asyncio.run(main()) == "done"
