"""Monitoring of processes that a run depends on besides its workers: Ray's raylet and GCS.

Ray itself reports the death of its raylet after half a minute, as a worker's death. It does not report the death of its
GCS, and ends the driver a minute later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import psutil

from alphaapollo.controller.ranks import CANCELLED_BY_MONITOR, WorkerDied
from alphaapollo.utils.heartbeat import read_process

POLL_SECONDS = 0.5


@asynccontextmanager
async def monitor_processes(required: Mapping[str, int], notify: Callable[[str], None]) -> AsyncIterator[None]:
    """Raise WorkerDied out of the block when one of the processes dies, whatever other errors follow from that.

    Args:
        required: pid by name.
        notify: shows a line at once, because Ray may end this process before the block is left.
    """
    task, dead = asyncio.current_task(), ""
    assert task

    async def poll() -> None:
        nonlocal dead
        while not (dead := _find_dead_process(required)):
            await asyncio.sleep(POLL_SECONDS)
        notify(f"{dead} died")
        task.cancel(CANCELLED_BY_MONITOR)

    polling = asyncio.create_task(poll())
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        if dead:
            while task.cancelling():
                task.uncancel()
        elif isinstance(error, Exception):  # it may have come before the next poll
            dead = _find_dead_process(required)
        if dead:
            raise WorkerDied(f"{dead} died", "Ray") from None
        raise
    finally:
        polling.cancel()


def _find_dead_process(required: Mapping[str, int]) -> str:
    for name, pid in required.items():
        process = read_process(pid)
        if process is None or process.state == psutil.STATUS_ZOMBIE:
            return f"{name} on this machine (pid {pid})"
    return ""
