"""Call functions on the workers of one role.

    Ranks[W]            interface: call a function with the worker on every rank, or on one rank
      LocalRanks        one rank in this process (trainer.controller=local)
      RemoteRanks       one process per rank (remote_ranks.py)
        ProcessRanks    forked on this machine (process_ranks.py; trainer.controller=local with several workers)
        RayRanks        Ray actors (ray_ranks.py)

Callers pass a function of the worker: `await ranks.call(lambda worker: worker.update(step))`."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from alphaapollo.controller.errors import EngineCoreDied
from alphaapollo.engines.types import EngineDied
from alphaapollo.utils.heartbeat import HEARTBEAT, Report

W = TypeVar("W", covariant=True)
A = TypeVar("A")
Result = Any  # of a function that is called on workers, or an awaitable of it. mypy does not infer it from a lambda


class Ranks(ABC, Generic[W]):
    """The workers of one role, rank 0 first."""

    role: str  # e.g. policy, reward model or rollout
    size: int

    @abstractmethod
    async def call(self, function: Callable[[W], Result]) -> list[Result]:
        """Call `function(worker)`, which may be async, on every rank at once. Returns the results in rank order."""

    @abstractmethod
    async def call_with_items(self, function: Callable[[W, A], Result], items: Sequence[A]) -> list[Result]:
        """Call `function(worker, items[rank])` on every rank at once. Returns the results in rank order."""

    @abstractmethod
    async def call_rank(self, rank: int, function: Callable[..., Awaitable[A] | A], *arguments: object) -> A:
        """Call `function(worker, *arguments)` on one rank and return the result."""

    @abstractmethod
    async def close(self) -> None:
        """End the workers' processes."""

    def collect_reports(self, timeout: float, with_stacks: bool = False) -> list[Report]:
        """Return a report of the heartbeat of each worker in another process. The thread of the stall monitor calls
        this. The report of a worker that does not answer in time is empty."""
        return []


def get_enclosing_method_name(function: Callable[..., object]) -> str:
    """Return the name of the method that contains a lambda, e.g. `update` for a lambda in PolicyGroup.update."""
    name: str = getattr(function, "__qualname__", "call")
    return name.partition(".<locals>")[0].rpartition(".")[2]


async def await_if_awaitable(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class LocalRanks(Ranks[W]):
    """One worker in this process. It computes the same numbers as a Ray actor and can be debugged directly.

    thread: the thread in which the worker was built and is called, because torch has settings per thread. The event
    loop then writes checkpoints and handles signals while the worker computes. None: the thread of the event loop."""

    def __init__(self, worker: W, role: str = "worker", thread: ThreadPoolExecutor | None = None):
        self.worker, self.role, self.size = worker, role, 1
        self._thread = thread

    async def call(self, function: Callable[[W], Result]) -> list[Result]:
        return [await self.call_rank(0, function)]

    async def call_with_items(self, function: Callable[[W, A], Result], items: Sequence[A]) -> list[Result]:
        return [await self.call_rank(0, function, items[0])]

    async def call_rank(self, rank: int, function: Callable[..., Awaitable[A] | A], *arguments: object) -> A:
        """Call the function, and record the call for stall detection. EngineDied becomes EngineCoreDied."""
        try:
            with HEARTBEAT.record_call(get_enclosing_method_name(function), f"{self.role} 0"):
                return await self._call_worker(function, *arguments)
        except EngineDied as error:
            raise EngineCoreDied(str(error), self.role) from None

    async def _call_worker(self, function: Callable[..., Awaitable[A] | A], *arguments: object) -> A:
        if self._thread is None:
            return await await_if_awaitable(function(self.worker, *arguments))
        result = await asyncio.wrap_future(self._thread.submit(function, self.worker, *arguments))
        return await await_if_awaitable(result)

    async def close(self) -> None:
        await self._call_worker(lambda worker: worker.close())
        if self._thread:
            self._thread.shutdown()
