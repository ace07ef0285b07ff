"""Monitoring of processes that a run depends on besides its workers: Ray's raylet and GCS.

Ray itself reports the death of its raylet after half a minute, as a worker's death. It does not report the death of its
GCS, and ends the driver a minute later.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Mapping
from types import TracebackType

from alphaapollo.controller.ranks import WorkerDied


class ProcessMonitor:
    """`async with ProcessMonitor({"Ray's raylet": 71}, print):` raises WorkerDied out of the block when one of the
    processes dies, whatever other errors follow from that. Without the kernel's pidfd it does nothing.

    notify: shows a line at once, because Ray may end this process before the block is left.
    """

    def __init__(self, required: Mapping[str, int], notify: Callable[[str], None]):
        self._required, self._notify = required, notify
        self._names: dict[int, str] = {}  # by pidfd
        self._died = ""

    def has_cancelled_block(self) -> bool:
        """Whether the monitor has cancelled the block."""
        return bool(self._died)

    async def __aenter__(self) -> ProcessMonitor:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for name, pid in self._required.items():
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue
            self._names[descriptor] = f"{name} on this machine (pid {pid})"
            self._loop.add_reader(descriptor, self._end, descriptor)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        cancelled = self.has_cancelled_block()
        for descriptor, name in self._names.items():
            self._loop.remove_reader(descriptor)
            if not self._died and _has_ended(descriptor):  # an error of the block may have come first
                self._died = name
            os.close(descriptor)
        if self._died and isinstance(error, (Exception, asyncio.CancelledError) if cancelled else Exception):
            assert self._task
            while cancelled and self._task.cancelling():
                self._task.uncancel()
            raise WorkerDied(f"{self._died} died", "Ray") from None

    def _end(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        if not self._died:
            self._died = self._names[descriptor]
            self._notify(f"{self._died} died")
            assert self._task
            self._task.cancel()


def _has_ended(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))
