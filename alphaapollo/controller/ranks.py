"""A worker object on each of several ranks, and how to call them.

    Ranks[W]            the interface: call a function of the worker on every rank, or on one
      LocalRanks        one rank, in this process (controller=local)
      RayRanks          each rank a Ray actor (ray_ranks.py)

A call is written where it is made: `await ranks.call(lambda worker: worker.update(step))`.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from alphaapollo.controller.health.stall_detector import Seen
from alphaapollo.engines.protocol import EngineDied
from alphaapollo.utils.heartbeat import PULSE

W = TypeVar("W")
A = TypeVar("A")


class WorkerLost(RuntimeError):
    """Somebody on whom the run depends is gone or stands still: started anew, it would go on (trainer/restarts.py).

    who: the role, e.g. policy. what: happened, without a word on what follows from it.
    """

    def __init__(self, message: str, who: str, what: str = ""):
        super().__init__(message)
        self.who, self.what = who, what or message


class WorkerDied(WorkerLost):
    """A worker process is gone, or the engine core that it works with; the message says which."""


class Stalled(WorkerLost):
    """Nothing has moved for too long; `what` says who holds everybody up, `culprits` are their keys: policy 1."""

    def __init__(self, what: str, culprits: Sequence[str], way_on: str):
        super().__init__(f"{what}; {way_on}.", re.sub(r" \d+$", "", culprits[0]) if culprits else "", what)
        self.culprits = list(culprits)


class WorkerFailed(RuntimeError):
    """A worker raised; the message says which, and holds its traceback."""


class Ranks(ABC, Generic[W]):
    """The workers of one role, rank 0 first."""

    role: str  # policy, reward model, rollout
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

    # how they are, for a thread that watches (stall_watch.py); in this process nobody has to be asked

    def ask(self) -> None:
        """Ask each how it is, unless it still owes an answer. Returns at once."""

    def answered(self) -> bool:
        """All have, or have died."""
        return True

    def seen(self) -> list[Seen]:
        """What they have answered since they were asked."""
        return []

    def stacks(self, rank: int, pids: Sequence[int]) -> str:
        """What the worker finds out about processes of its node, itself among them."""
        raise NotImplementedError


def role_of(name: str, suffix: str) -> str:
    """RewardModelHost -> reward model"""
    return re.sub(r"\B[A-Z]", r" \g<0>", name.removesuffix(suffix)).lower()


def called(function: Callable[..., Any]) -> str:
    """Where a call is written: `update` for one that PolicyGroup.update makes."""
    name: str = getattr(function, "__qualname__", "call")
    return name.partition(".<locals>")[0].rpartition(".")[2]


async def resolve(value: Any) -> Any:
    """The value itself, or what it is a promise of."""
    return await value if inspect.isawaitable(value) else value


class LocalRanks(Ranks[W]):
    """One worker in this process: same code, same numbers, and a debugger sees everything."""

    def __init__(self, worker: W):
        self.worker = worker
        self.size = 1
        self.role = role_of(type(worker).__name__, "Worker")

    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        return [await self.call_one(0, function)]

    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        with self._calling(function):
            return [await resolve(function(self.worker, items[0]))]

    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        assert rank == 0, "controller=local has one rank"
        with self._calling(function):
            return await resolve(function(self.worker))

    @contextmanager
    def _calling(self, function: Callable[..., Any]) -> Iterator[None]:
        try:
            with PULSE.doing(called(function), f"{self.role} 0"):
                yield
        except EngineDied as error:
            raise WorkerDied(str(error), self.role) from None

    async def close(self) -> None:
        worker: Any = self.worker
        await resolve(worker.close())
