"""Workers on one or several ranks, and calls of their methods.

    Ranks[W]            interface: call a function with the worker on every rank, or on one rank
      LocalRanks        one rank in this process (trainer.controller=local)
      ThreadRanks       one rank in a separate thread of this process
      RayRanks          one Ray actor per rank (ray_ranks.py)

Callers pass a function of the worker: `await ranks.call(lambda worker: worker.update(step))`.
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
"""Cancellation message of the monitors (health/). It distinguishes them from a signal."""


class WorkerLost(RuntimeError):
    """A required process died or hangs; the run can be restarted (launch/restarts.py).

    role: role of the process, e.g. policy. cause: the event alone, without its consequences; default: the message.
    """

    def __init__(self, message: str, role: str, cause: str = ""):
        super().__init__(message)
        self.role, self.cause = role, cause or message


class WorkerDied(WorkerLost):
    """A worker process or an engine core has ended. The message names the process."""


class RunStalled(WorkerLost):
    """No process has made progress for too long.

    `cause` names the blocking workers, and `culprits` has their keys, e.g. "policy 1".
    """

    def __init__(self, cause: str, culprits: Sequence[str], next_step: str):
        role = re.sub(r" \d+$", "", culprits[0]) if culprits else ""
        super().__init__(f"{cause}; {next_step}.", role, cause)
        self.culprits = list(culprits)


class WorkerFailed(RuntimeError):
    """A worker raised an exception. The message names the worker and has its traceback."""


class Ranks(ABC, Generic[W]):
    """The workers of one role, rank 0 first."""

    role: str  # e.g. policy, reward model or rollout
    size: int

    @abstractmethod
    async def call(self, function: Callable[[W], Any]) -> list[Any]:
        """Call `function(worker)` on every rank concurrently. Returns the (awaited) results in rank order."""

    @abstractmethod
    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        """Call `function(worker, items[rank])` on every rank. Returns the results in rank order. Over Ray, each
        distinct item is put into the object store once."""

    @abstractmethod
    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        """Call `function(worker)` on one rank and return the result."""

    @abstractmethod
    async def close(self) -> None:
        """End the workers' processes."""

    # Methods for the thread of health/stall_monitor.py. Workers in the controller's process have no separate state.

    def request_reports(self) -> None:
        """Request a report from every worker without a pending request. Returns at once."""

    def have_reported(self) -> bool:
        """Return whether every worker has sent its report or has died."""
        return True

    def take_snapshots(self) -> list[WorkerSnapshot]:
        """Return a snapshot of each worker with its report since the last request."""
        return []

    def collect_stacks(self, rank: int, pids: Sequence[int]) -> str:
        """Return the Python stacks of processes on the worker's node. The worker collects them."""
        raise NotImplementedError


def get_method_name(function: Callable[..., Any]) -> str:
    """Return the name of the method that contains a lambda, e.g. `update` for a lambda in PolicyGroup.update."""
    name: str = getattr(function, "__qualname__", "call")
    return name.partition(".<locals>")[0].rpartition(".")[2]


async def await_if_needed(value: Any) -> Any:
    """Return the value, or the result of an awaitable."""
    return await value if inspect.isawaitable(value) else value


class LocalRanks(Ranks[W]):
    """One worker in this process. It computes the same numbers as a Ray actor and can be debugged directly."""

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
    """One worker in a separate thread of this process. It computes while the event loop writes checkpoints and handles
    signals. torch has thread and GPU settings per thread, so the worker is built and called in this thread only."""

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
