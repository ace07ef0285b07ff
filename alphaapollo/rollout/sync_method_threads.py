"""Run sync environment methods in threads. Each call gets a new daemon thread, abandoned if the call never returns.

A thread pool would lose one thread per hanging environment, and the process could not exit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from threading import Thread
from typing import Any

from alphaapollo.utils.time_limit import exclude_waiting

MAX_CONCURRENT_CALLS = 64

Outcome = tuple[Any, BaseException | None]


class SyncMethodThreads:
    """Limits concurrent calls; abandoned calls do not count. Bound to one event loop."""

    def __init__(self, max_concurrent: int = MAX_CONCURRENT_CALLS):
        self._slots = asyncio.Semaphore(max_concurrent)

    async def run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return the method's result or raise its exception. If cancelled, the thread is abandoned."""
        with exclude_waiting():
            await self._slots.acquire()
        try:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[Outcome] = loop.create_future()
            Thread(target=_run, args=(loop, answer, method, arguments), daemon=True).start()
            result, error = await answer
        finally:
            self._slots.release()
        if error is not None:
            raise error
        return result


def _run(
    loop: asyncio.AbstractEventLoop,
    answer: asyncio.Future[Outcome],
    method: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    outcome: Outcome
    try:
        outcome = method(*arguments), None
    except BaseException as error:  # noqa: BLE001  raised in the caller
        outcome = None, error
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_set_result, answer, outcome)


def _set_result(answer: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not answer.done():
        answer.set_result(outcome)
