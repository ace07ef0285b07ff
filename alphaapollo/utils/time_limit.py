"""Time limit that excludes waiting for shared resources (a grader, a tool, a thread).

    limit = TimeLimit(seconds)
    async with limit.count_time():     # TimeoutError once all such blocks together took longer
        with exclude_waiting():     # in any function or task started inside the block: not counted
            await semaphore.acquire()

pause_time_limits and resume_time_limits apply to all limits of the process, e.g. while the GPU is used by the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

_current: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)
_running: set[TimeLimit] = set()  # limits inside a count_time() block
_paused = False


def pause_time_limits() -> None:
    """Stop counting time in all limits until resume_time_limits."""
    global _paused
    _paused = True
    for limit in _running:
        limit._update()


def resume_time_limits() -> None:
    global _paused
    _paused = False
    for limit in _running:
        limit._update()


class TimeLimit:
    """`left`: seconds until the limit. Bound to one event loop; its blocks do not nest."""

    def __init__(self, seconds: float):
        self.left = seconds
        self._scope: asyncio.Timeout | None = None  # of the current block
        self._since: float | None = None  # start of the counted time; None: not counting
        self._waits = 0

    @asynccontextmanager
    async def count_time(self) -> AsyncIterator[None]:
        """Count the time of this block. Raises TimeoutError when the limit is exceeded."""
        token = _current.set(self)
        try:
            async with asyncio.timeout(None) as self._scope:
                _running.add(self)
                self._update()
                try:
                    yield
                finally:
                    _running.discard(self)
                    self._update(ended=True)
        finally:
            _current.reset(token)

    def _update(self, ended: bool = False) -> None:
        """Subtract the time that has passed, then continue or stop counting."""
        scope, now = self._scope, asyncio.get_running_loop().time()
        if self._since is not None:
            self.left -= now - self._since
            self._since = None
        if scope is None or scope.expired():
            return
        if ended:
            self._scope = None
        elif not self._waits and not _paused:
            self._since = now
        scope.reschedule(None if self._since is None else now + self.left)


@contextmanager
def exclude_waiting() -> Iterator[None]:
    """Do not count the time of this block in the enclosing limit, if there is one."""
    limit = _current.get()
    if limit is None:
        yield
        return
    limit._waits += 1
    limit._update()
    try:
        yield
    finally:
        limit._waits -= 1
        limit._update()
