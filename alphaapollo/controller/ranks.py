"""A worker on each of several ranks, and how to call it.

    Ranks[W]            interface: call a function of the worker on every rank, or on one
      LocalRanks        one rank, in this process (trainer.controller=local)
      ThreadRanks       likewise, in a thread of its own
      RayRanks          each rank a Ray actor (ray_ranks.py)

A call is written where it is made: `await ranks.call(lambda worker: worker.update(step))`.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from alphaapollo.controller.health.stall_detector import WorkerSnapshot
from alphaapollo.engines.protocol import EngineDied
from alphaapollo.utils.heartbeat import HEARTBEAT

W = TypeVar("W")
A = TypeVar("A")
CANCELLED_BY_MONITOR = "a required process died or hangs"
"""Message with which the monitors (health/) cancel a run, unlike a signal."""


class WorkerLost(RuntimeError):
    """A required process died or hangs; the run can be restarted (launch/restarts.py).

    role: e.g. policy. cause: what happened, without what follows from it.
    """

    def __init__(self, message: str, role: str, cause: str = ""):
        super().__init__(message)
        self.role, self.cause = role, cause or message


class WorkerDied(WorkerLost):
    """A worker process, or the engine core that it works with, has ended. The message names it."""


class RunStalled(WorkerLost):
    """Nothing has made progress for too long. `cause` names the blocking workers, `culprits` are their keys (policy
    1)."""

    def __init__(self, cause: str, culprits: Sequence[str], next_step: str):
        role = re.sub(r" \d+$", "", culprits[0]) if culprits else ""
        super().__init__(f"{cause}; {next_step}.", role, cause)
        self.culprits = list(culprits)


class WorkerFailed(RuntimeError):
    """A worker raised. The message names it and has its traceback."""


class Ranks(ABC, Generic[W]):
    """The workers of one role, rank 0 first."""

    role: str  # policy, reward model, rollout
    size: int

    @abstractmethod
    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        """Call `function(worker)` on every rank concurrently. Returns the (awaited) results in rank order."""

    @abstractmethod
    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        """Call `function(worker, items[rank])` on every rank. Items travel once, through the object store."""

    @abstractmethod
    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        """Call `function(worker)` on one rank."""

    @abstractmethod
    async def close(self) -> None:
        """End the workers' processes."""

    # Health, for the thread of health/stall_monitor.py. Workers in the controller's process have no separate state.

    def request_reports(self) -> None:
        """Ask every worker for a report, unless it still owes one. Returns at once."""

    def have_reported(self) -> bool:
        """Whether every worker has sent its report, or has died."""
        return True

    def take_snapshots(self) -> list[WorkerSnapshot]:
        """What is known of each worker since the last request."""
        return []

    def collect_stacks(self, rank: int, pids: Sequence[int]) -> str:
        """Python stacks of processes on the worker's node, collected by the worker."""
        raise NotImplementedError


def get_method_name(function: Callable[..., Any]) -> str:
    """Name of the method that makes a call: `update` for a lambda in PolicyGroup.update."""
    name: str = getattr(function, "__qualname__", "call")
    return name.partition(".<locals>")[0].rpartition(".")[2]


async def await_if_needed(value: Any) -> Any:
    """The value itself, or the awaited value of an awaitable."""
    return await value if inspect.isawaitable(value) else value


class LocalRanks(Ranks[W]):
    """One worker in this process: same code, same numbers, and a debugger sees everything."""

    def __init__(self, worker: W):
        self.worker = worker
        self.size = 1
        self.role = re.sub(r"\B[A-Z]", r" \g<0>", type(worker).__name__.removesuffix("Worker")).lower()

    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        return [await self.call_one(0, function)]

    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        with self._record_call(function):
            return [await self._run(lambda: function(self.worker, items[0]))]

    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        assert rank == 0, "controller=local has one rank"
        with self._record_call(function):
            return await self._run(lambda: function(self.worker))

    async def _run(self, function: Callable[[], Any]) -> Any:
        return await await_if_needed(function())

    @contextmanager
    def _record_call(self, function: Callable[..., Any]) -> Iterator[None]:
        try:
            with HEARTBEAT.call(get_method_name(function), f"{self.role} 0"):
                yield
        except EngineDied as error:
            raise WorkerDied(str(error), self.role) from None

    async def close(self) -> None:
        worker: Any = self.worker
        await self._run(worker.close)


class ThreadRanks(LocalRanks[W]):
    """One worker in a thread of this process: it computes while the event loop writes checkpoints and handles signals.
    torch has thread and GPU settings per thread, so the worker is built and called in that thread only."""

    def __init__(self, build: Callable[[], W], role: str):
        self._thread = ThreadPoolExecutor(1, role)
        try:
            super().__init__(self._thread.submit(build).result())
        except BaseException:
            self._thread.shutdown()
            raise
        self.role = role

    async def _run(self, function: Callable[[], Any]) -> Any:
        return await await_if_needed(await asyncio.wrap_future(self._thread.submit(function)))

    async def close(self) -> None:
        await super().close()
        self._thread.shutdown()
