"""A worker object on each of several ranks, and how to call them.

    Ranks[W]            the interface: call a function of the worker on every rank, or on one
      LocalRanks        one rank, in this process (controller=local)
      RayRanks          each rank a Ray actor (ray_ranks.py)

A call is written where it is made: `await ranks.call(lambda worker: worker.update(step))`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

W = TypeVar("W")
A = TypeVar("A")


class WorkerDied(RuntimeError):
    """A worker process is gone; the message says which."""


class WorkerFailed(RuntimeError):
    """A worker raised; the message says which, and holds its traceback."""


class Ranks(ABC, Generic[W]):
    """The workers of one role, rank 0 first."""

    size: int

    @abstractmethod
    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        """`function(worker)` on every rank at once; the results (awaited, if they can be) in rank order."""

    @abstractmethod
    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        """`function(worker, items[rank])` on every rank at once; large items travel once, through the object store."""

    @abstractmethod
    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        """`function(worker)` on one rank."""

    @abstractmethod
    async def close(self) -> None:
        """End the workers' processes."""


async def resolve(value: Any) -> Any:
    """The value itself, or what it is a promise of."""
    return await value if inspect.isawaitable(value) else value


class LocalRanks(Ranks[W]):
    """One worker in this process: same code, same numbers, and a debugger sees everything."""

    def __init__(self, worker: W):
        self.worker = worker
        self.size = 1

    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        return [await resolve(function(self.worker))]

    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        return [await resolve(function(self.worker, items[0]))]

    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        assert rank == 0, "controller=local has one rank"
        return await resolve(function(self.worker))

    async def close(self) -> None:
        worker: Any = self.worker
        await resolve(worker.close())
