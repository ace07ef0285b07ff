"""Limit the time of an operation, not counting the time that it waits for shared resources (graders, tools, threads).

    limit = TimeLimit(seconds)
    async with limit.count_time():     # TimeoutError once the total time of these blocks exceeds the limit
        with exclude_from_time_limit():     # waiting in a function or task of the block is not counted
            await semaphore.acquire()

pause_all_time_limits applies to the whole process, e.g. while the trainer uses the GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar

_current: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)
_running: set[TimeLimit] = set()  # limits inside a count_time() block
_paused = False


def pause_all_time_limits(is_paused: bool = True) -> None:
    """Stop counting time in all time limits of this process, or continue if not is_paused."""
    global _paused
    _paused = is_paused
    for limit in _running:
        limit._update_time_left()


class TimeLimit:
    """Limit on the total time of all `with limit.count_time()` blocks, which must not be nested."""

    def __init__(self, seconds: float):
        self.seconds_left = seconds
        self._scope: asyncio.Timeout | None = None  # timeout of the current block
        self._since: float | None = None  # event loop time at which counting started; None: paused
        self._num_excluded = 0  # blocks of `exclude` that are running

    @asynccontextmanager
    async def count_time(self) -> AsyncIterator[None]:
        """Context manager that counts the time of its block. Raises TimeoutError when the total exceeds the limit."""
        token = _current.set(self)
        try:
            async with asyncio.timeout(None) as self._scope:
                _running.add(self)
                self._update_time_left()
                try:
                    yield
                finally:
                    _running.discard(self)
                    self._update_time_left(has_ended=True)
        finally:
            _current.reset(token)

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Context manager whose block is not counted, even in another task. Blocks may overlap."""
        self._num_excluded += 1
        self._update_time_left()
        try:
            yield
        finally:
            self._num_excluded -= 1
            self._update_time_left()

    def _update_time_left(self, has_ended: bool = False) -> None:
        """Subtract the time since the last update from `seconds_left`. Continue counting unless paused or has_ended."""
        scope, now = self._scope, asyncio.get_running_loop().time()
        if self._since is not None:
            self.seconds_left -= now - self._since
            self._since = None
        if scope is None or scope.expired():
            return
        if has_ended:
            self._scope = None
        elif not self._num_excluded and not _paused:
            self._since = now
        scope.reschedule(None if self._since is None else now + self.seconds_left)


def exclude_from_time_limit() -> AbstractContextManager[None]:
    """Context manager whose block is not counted by the enclosing TimeLimit, if there is one."""
    limit = _current.get()
    return nullcontext() if limit is None else limit.exclude()
