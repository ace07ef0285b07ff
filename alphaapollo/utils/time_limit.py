"""A time limit that counts only what it is about: while something waits for its turn at what is shared (a grader, a
tool, a thread), its clock stands still, so that only who is slow is blamed.

    clock = Clock(seconds)
    async with clock.running():   # TimeoutError once all such blocks together took longer
        with queueing():          # anywhere below, other tasks that were started there included: not counted
            await semaphore.acquire()

stop_clocks and start_clocks are for all of a process at once: while the machine is somebody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_current: ContextVar[Clock | None] = ContextVar("clock", default=None)
_running: set[Clock] = set()  # those with a block at hand
_stopped = False  # all of them


def stop_clocks() -> None:
    """From here on no clock runs, until start_clocks."""
    global _stopped
    _stopped = True
    for clock in _running:
        clock._settle()


def start_clocks() -> None:
    global _stopped
    _stopped = False
    for clock in _running:
        clock._settle()


class Clock:
    """`left`: seconds until the limit. Belongs to one event loop; its blocks do not nest."""

    def __init__(self, seconds: float):
        self.left = seconds
        self._scope: asyncio.Timeout | None = None  # of the block at hand
        self._since: float | None = None  # when it began to run; None: it stands still
        self._queues = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Count the time of this block. TimeoutError, as asyncio.timeout raises it, where it is too long."""
        token = _current.set(self)
        try:
            async with asyncio.timeout(None) as self._scope:
                _running.add(self)
                self._settle()
                try:
                    yield
                finally:
                    _running.discard(self)
                    self._settle(ended=True)
        finally:
            _current.reset(token)

    def _settle(self, ended: bool = False) -> None:
        """Take off what has passed, and run or stand still from here on."""
        scope, now = self._scope, asyncio.get_running_loop().time()
        if self._since is not None:
            self.left -= now - self._since
            self._since = None
        if scope is None or scope.expired():
            return
        if ended:
            self._scope = None
        elif not self._queues and not _stopped:
            self._since = now
        scope.reschedule(None if self._since is None else now + self.left)


@contextmanager
def queueing() -> Iterator[None]:
    """This block is no work of whom the running clock is about (nothing happens without one)."""
    clock = _current.get()
    if clock is None:
        yield
        return
    clock._queues += 1
    clock._settle()
    try:
        yield
    finally:
        clock._queues -= 1
        clock._settle()
