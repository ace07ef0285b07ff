"""Monitor of the processes that a run depends on besides its workers: Ray's raylet and GCS.

Ray reports the death of its raylet only after half a minute, and as the death of a worker. If Ray's GCS dies, Ray
reports nothing and ends the driver a minute later.
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
async def monitor_processes(required_pids: Mapping[str, int], notify: Callable[[str], None]) -> AsyncIterator[None]:
    """Context manager that raises WorkerDied when a required process dies, instead of the errors that its death causes.

    required_pids: name -> pid of the processes. notify: prints a line at once, because Ray may end this process soon.
    """
    task, dead = asyncio.current_task(), ""
    assert task

    async def poll_processes() -> None:
        nonlocal dead
        while not (dead := find_dead_process(required_pids)):
            await asyncio.sleep(POLL_SECONDS)
        notify(f"{dead} died")
        task.cancel(CANCELLED_BY_MONITOR)

    polling = asyncio.create_task(poll_processes())
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        if dead:
            while task.cancelling():
                task.uncancel()
        elif isinstance(error, Exception):  # the process may have died since the last poll
            dead = find_dead_process(required_pids)
        if dead:
            raise WorkerDied(f"{dead} died", "Ray") from None
        raise
    finally:
        polling.cancel()


def find_dead_process(required_pids: Mapping[str, int]) -> str:
    """Return the name and the pid of the first dead process, or "" if all are alive. required_pids: name -> pid."""
    for name, pid in required_pids.items():
        process = read_process(pid)
        if process is None or process.state == psutil.STATUS_ZOMBIE:
            return f"{name} on this machine (pid {pid})"
    return ""
