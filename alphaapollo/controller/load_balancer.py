"""Assign generation requests, in order of arrival, to the least loaded engine."""

from __future__ import annotations

import asyncio
from collections import deque


class LoadBalancer:
    """Load balancer that counts the samples in flight on each engine.

    Among equally loaded engines the first one is chosen. `capacity`: maximum number of samples in flight per engine. A
    larger request waits for an idle engine.
    """

    def __init__(self, num_engines: int, capacity: int):
        self._capacity = capacity
        self._load = [0] * num_engines
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    async def acquire_engine(self, num_samples: int) -> int:
        """Wait until an engine has capacity for `num_samples` samples, reserve it, and return the engine's index."""
        slot: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_samples, slot))
        self._assign_waiting_requests()
        try:
            return await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # an engine was assigned before the cancellation
                self.release_capacity(slot.result(), num_samples)
            raise

    def release_capacity(self, engine: int, num_samples: int) -> None:
        """Free the capacity of finished samples on an engine."""
        self._load[engine] -= num_samples
        self._assign_waiting_requests()

    def _assign_waiting_requests(self) -> None:
        while self._waiting:
            num_samples, slot = self._waiting[0]
            if not slot.done():
                load = min(self._load)
                if load and load + num_samples > self._capacity:
                    return
                engine = self._load.index(load)
                self._load[engine] += num_samples
                slot.set_result(engine)
            self._waiting.popleft()
