"""Futures of calls, and the order of the calls of one model.

The client sends calls without waiting for earlier ones, over several connections, and asks for each result later. It
numbers the calls of a model: 0 creates it. Calls may arrive in any order. They run in the order of their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from alphaapollo.controller.errors import WorkerLost
from alphaapollo.plugins.tinker.budget import ENTRY, Budget
from alphaapollo.plugins.tinker.wire import RequestError
from alphaapollo.utils.json_types import Json

Call = Callable[[], Awaitable[Json]]
KEEP_SECONDS = 300.0  # of results that were retrieved, for a client that lost the answer
GAP_SECONDS = 400.0  # that later calls wait for one that does not arrive; the client repeats a request for 300 s


@dataclass(eq=False)
class _Call:
    future: asyncio.Future[Json]
    budget: Budget
    size: int = 0  # of the result in the budget


class Futures:
    """Results of calls by request id. lost_worker: error of a call after which no other call can succeed."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}
        self.lost_worker: Exception | None = None
        self._closing, self._tasks = asyncio.Event(), set[asyncio.Task[None]]()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._calls

    def add(self, request_id: str, budget: Budget) -> asyncio.Future[Json]:
        """Add a call whose result will count in a budget."""
        future = asyncio.get_running_loop().create_future()
        self._calls[request_id] = _Call(future, budget)
        future.add_done_callback(lambda _: self._count(request_id))
        return future

    def start(self, request_id: str, call: Call, budget: Budget, on_end: Callable[[], None]) -> None:
        """Start a call at once. It is cancelled when its future is. on_end: called when it has ended."""
        future = self.add(request_id, budget)
        task = asyncio.create_task(self.run(call, future))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: on_end())
        future.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)

    async def wait(self, request_id: str, seconds: float) -> asyncio.Future[Json] | None:
        """Return the completed future of a call; None if it is not complete after some seconds. Raises RequestError for
        an unknown call."""
        if (found := self._calls.get(request_id)) is None:
            raise RequestError(
                f"the result of {request_id} does not exist any more: results are kept for {KEEP_SECONDS:g} s after "
                "they were retrieved, and until the session ends.",
                status=404,
            )
        future, closing = found.future, asyncio.create_task(self._closing.wait())
        await asyncio.wait([future, closing], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if future.done() and request_id in self._calls and request_id not in found.budget.retrieved:
            found.budget.retrieved[request_id] = self._remove
            asyncio.get_running_loop().call_later(KEEP_SECONDS, self._remove, request_id)
        return future if future.done() else None

    def stop_waiting(self) -> None:
        """Let all calls of `wait` return, because the server ends."""
        self._closing.set()

    async def run(self, call: Call, future: asyncio.Future[Json]) -> None:
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
        for request_id in [one for one in self._calls if one.startswith(prefix)]:
            self._remove(request_id)

    def _count(self, request_id: str) -> None:
        if call := self._calls.get(request_id):
            failed = call.future.cancelled() or call.future.exception()
            result = None if failed else call.future.result()
            call.size = ENTRY + (len(result) if isinstance(result, bytes) else 0)
            call.budget.size += call.size

    def _remove(self, request_id: str) -> None:
        if call := self._calls.pop(request_id, None):
            call.future.cancel()
            call.budget.retrieved.pop(request_id, None)
            call.budget.size -= call.size


class CallQueue:
    """Calls of one model in the order of their numbers.

    on_gap: called with a message if a call did not arrive, before later ones run. budget: of the model's owner.
    """

    def __init__(self, model_id: str, futures: Futures, on_gap: Callable[[str], None], budget: Budget):
        self.model_id, self._futures, self._on_gap, self._budget = model_id, futures, on_gap, budget
        self._next, self._waiting = 0, dict[int, tuple[Call, asyncio.Future[Json], int]]()
        self._arrived, self._is_closing = asyncio.Event(), False
        self._task = asyncio.create_task(self._run())

    def put(self, number: int, call: Call, size: int = 0) -> str:
        """Add a call, and return its request id. A repeated one is not run again. size: bytes of its request, which
        count until it has run. Raises RequestError if the budget does not allow them."""
        request_id = f"{self.model_id}:{number}"
        if number >= self._next and request_id not in self._futures:
            self._budget.add(ENTRY + size, stays=number > self._next)
            self._waiting[number] = call, self._futures.add(request_id, self._budget), ENTRY + size
            self._arrived.set()
        return request_id

    async def close(self) -> None:
        """Stop after the call that is running."""
        self._is_closing = True
        self._arrived.set()
        await self._task
        self._budget.size -= sum(size for _, _, size in self._waiting.values())

    async def _run(self) -> None:
        while not self._is_closing:
            if self._next in self._waiting:
                call, future, size = self._waiting.pop(self._next)
                await self._futures.run(call, future)
                self._budget.size -= size
                self._next += 1
                continue
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), GAP_SECONDS if self._waiting else None)
            except TimeoutError:
                self._on_gap(f"call {self._next} did not arrive within {GAP_SECONDS:g} s")
                self._next = min(self._waiting)
