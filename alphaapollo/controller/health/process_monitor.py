"""Processes besides the workers without which nothing goes on: Ray's own. Their death is told at once, as what it is.

Ray itself tells of its raylet after half a minute, and calls it a worker's death; of its GCS it tells nobody: a minute
later the driver ends.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Mapping
from types import TracebackType

from alphaapollo.controller.ranks import WorkerDied


class ProcessWatch:
    """`async with ProcessWatch({"Ray's raylet": 71}, print):` around what needs it. Raises WorkerDied out of the block
    where one has died, whatever else that has led to. Without the kernel's pidfd it sees nothing, and Ray's word
    remains.

    tell: shows a line at once, for Ray may end this process before the block is left.
    """

    def __init__(self, needed: Mapping[str, int], tell: Callable[[str], None]):
        self._needed, self._tell = needed, tell
        self._names: dict[int, str] = {}  # by what stands for the process
        self._died = ""

    def gave_up(self) -> bool:
        """It is who has cancelled the block."""
        return bool(self._died)

    async def __aenter__(self) -> ProcessWatch:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for name, pid in self._needed.items():
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
        cancelled = self.gave_up()
        for descriptor, name in self._names.items():
            self._loop.remove_reader(descriptor)
            if not self._died and _has_ended(descriptor):  # others may have felt it first
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
            self._tell(f"{self._died} died")
            assert self._task
            self._task.cancel()


def _has_ended(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))
