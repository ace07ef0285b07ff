"""Futures of calls, and the order of the calls of one model.

The client sends calls without waiting for earlier ones, over several connections, and asks for each result later. It
numbers the calls of a model from 1. They run in this order, in which they need not arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from alphaapollo.controller.errors import WorkerLost
from alphaapollo.engines.types import EngineDied
from alphaapollo.tinker_server.wire import RequestError

WORKER_ERRORS = (EngineDied, WorkerLost)
Call = Callable[[], Awaitable[Any]]
KEEP_SECONDS = 300.0  # of results that were retrieved, for a client that lost the answer


class Futures:
    """Results of calls by request id. lost_worker: error of a call after which no other call can succeed."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self.lost_worker: Exception | None = None
        self._closing = asyncio.Event()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def add(self, request_id: str) -> asyncio.Future[Any]:
        future = self._futures[request_id] = asyncio.get_running_loop().create_future()
        return future

    def start(self, request_id: str, call: Call) -> asyncio.Task[None] | None:
        """Start a call at once. A repeated one is not run again."""
        if request_id in self._futures:
            return None
        return asyncio.create_task(self.run(call, self.add(request_id)))

    async def wait(self, request_id: str, seconds: float) -> asyncio.Future[Any] | None:
        """Return the completed future of a call; None if it is not complete after some seconds. Raises RequestError for
        an unknown call."""
        if (future := self._futures.get(request_id)) is None:
            raise RequestError(f"there is no call {request_id}: its session has ended.", status=404)
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait([future, closing], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if future.done():
            asyncio.get_running_loop().call_later(KEEP_SECONDS, self._futures.pop, request_id, None)
        return future if future.done() else None

    def stop_waiting(self) -> None:
        """Let all calls of `wait` return, because the server ends."""
        self._closing.set()

    async def run(self, call: Call, future: asyncio.Future[Any]) -> None:
        """Run a call and complete its future with the result or the error."""
        try:
            result = await call()
        except Exception as error:  # noqa: BLE001  the client gets it
            self.lost_worker = error if isinstance(error, WORKER_ERRORS) else self.lost_worker
            if not future.done():
                future.set_exception(error)
                future.exception()  # it counts as retrieved, also if the client has gone
        else:
            if not future.done():
                future.set_result(result)

    def drop(self, prefix: str) -> None:
        """Remove the calls whose ids start with a prefix. Those that are waiting are cancelled."""
        for request_id in [one for one in self._futures if one.startswith(prefix)]:
            self._futures.pop(request_id).cancel()


class CallQueue:
    """Calls of one model in the order of their numbers."""

    def __init__(self, model_id: str, futures: Futures):
        self.model_id, self._futures = model_id, futures
        self._next, self._waiting = 1, dict[int, tuple[Call, asyncio.Future[Any]]]()
        self._arrived, self._is_closing = asyncio.Event(), False
        self._task = asyncio.create_task(self._run())

    def put(self, number: int, call: Call) -> str:
        """Add a call, and return its request id. A repeated one is not run again."""
        request_id = f"{self.model_id}:{number}"
        if number >= self._next and request_id not in self._futures:
            self._waiting[number] = call, self._futures.add(request_id)
            self._arrived.set()
        return request_id

    async def close(self) -> None:
        """Stop after the call that is running."""
        self._is_closing = True
        self._arrived.set()
        await self._task

    async def _run(self) -> None:
        while not self._is_closing:
            if self._next in self._waiting:
                await self._futures.run(*self._waiting.pop(self._next))
                self._next += 1
            else:
                self._arrived.clear()
                await self._arrived.wait()
