"""Futures of calls, and the order of the calls of one model.

The client sends calls without waiting for earlier ones, over several connections, and asks for each result later. It
numbers the calls of a model: 0 creates it. Calls may arrive in any order. They run in the order of their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from alphaapollo.controller.errors import WorkerLost
from alphaapollo.tinker_server.wire import RequestError

Call = Callable[[], Awaitable[Any]]
KEEP_SECONDS = 300.0  # of results that were retrieved, for a client that lost the answer
GAP_SECONDS = 400.0  # that later calls wait for one that does not arrive; the client repeats a request for 300 s
MAX_WAITING = 256 << 20  # bytes of the requests of one model that wait; the client then waits before it sends more


class Futures:
    """Results of calls by request id. lost_worker: error of a call after which no other call can succeed."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self.lost_worker: Exception | None = None
        self._closing, self._tasks = asyncio.Event(), set[asyncio.Task[None]]()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    def add(self, request_id: str) -> asyncio.Future[Any]:
        future = self._futures[request_id] = asyncio.get_running_loop().create_future()
        return future

    def start(self, request_id: str, call: Call) -> None:
        """Start a call at once. It is cancelled when its future is."""
        future = self.add(request_id)
        task = asyncio.create_task(self.run(call, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        future.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)

    async def wait(self, request_id: str, seconds: float) -> asyncio.Future[Any] | None:
        """Return the completed future of a call; None if it is not complete after some seconds. Raises RequestError for
        an unknown call."""
        if (future := self._futures.get(request_id)) is None:
            raise RequestError(
                f"the result of {request_id} does not exist any more: results are kept for {KEEP_SECONDS:g} s after "
                "they were retrieved, and until the session ends.",
                status=404,
            )
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
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  the client gets it
            if isinstance(error, asyncio.CancelledError):
                error = RuntimeError("the call was cancelled, because its session or the workers have ended")
            self.lost_worker = error if isinstance(error, WorkerLost) else self.lost_worker
            if not future.done():
                future.set_exception(error)
                future.exception()  # it counts as retrieved, also if the client has gone
        else:
            if not future.done():
                future.set_result(result)

    def drop(self, prefix: str) -> None:
        """Remove the calls whose ids start with a prefix. Those that are not complete are cancelled."""
        for request_id in [one for one in self._futures if one.startswith(prefix)]:
            self._futures.pop(request_id).cancel()


class CallQueue:
    """Calls of one model in the order of their numbers.

    on_gap: called with a message if a call did not arrive, before later ones run.
    """

    def __init__(self, model_id: str, futures: Futures, on_gap: Callable[[str], None]):
        self.model_id, self._futures, self._on_gap = model_id, futures, on_gap
        self._next, self._waiting = 0, dict[int, tuple[Call, asyncio.Future[Any], int]]()
        self._arrived, self._is_closing = asyncio.Event(), False
        self._task = asyncio.create_task(self._run())

    def put(self, number: int, call: Call, size: int = 0) -> str:
        """Add a call, and return its request id. A repeated one is not run again. size: bytes of its request. Raises
        RequestError if too many are waiting."""
        request_id = f"{self.model_id}:{number}"
        if number >= self._next and request_id not in self._futures:
            if number > self._next and size + sum(size for _, _, size in self._waiting.values()) > MAX_WAITING:
                raise RequestError(f"the calls of {self.model_id} that wait have {MAX_WAITING} bytes.", status=429)
            self._waiting[number] = call, self._futures.add(request_id), size
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
                call, future, _ = self._waiting.pop(self._next)
                await self._futures.run(call, future)
                self._next += 1
                continue
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), GAP_SECONDS if self._waiting else None)
            except TimeoutError:
                self._on_gap(f"call {self._next} did not arrive within {GAP_SECONDS:g} s")
                self._next = min(self._waiting)
