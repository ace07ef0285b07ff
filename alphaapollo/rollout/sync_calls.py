"""Environments' sync methods: each call has a thread of its own, which is left behind if the call never returns.

A pool's threads would do, but for environments that hang: each would keep one of them for good, and the process could
not end, for it waits for a pool's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from threading import Thread
from typing import Any

from alphaapollo.utils.time_limit import queueing

AT_A_TIME = 64

Outcome = tuple[Any, BaseException | None]


class SyncCalls:
    """So many calls at a time; those that were given up do not count. Belongs to one event loop."""

    def __init__(self, at_a_time: int = AT_A_TIME):
        self._turns = asyncio.Semaphore(at_a_time)

    async def run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """What the method returns; raises what it raises. Cancelled, it leaves the thread behind."""
        with queueing():
            await self._turns.acquire()
        try:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[Outcome] = loop.create_future()
            Thread(target=_run, args=(loop, answer, method, arguments), daemon=True).start()
            result, error = await answer
        finally:
            self._turns.release()
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
    except BaseException as error:  # noqa: BLE001  raised where it is awaited
        outcome = None, error
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, answer, outcome)


def _settle(answer: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not answer.done():
        answer.set_result(outcome)
