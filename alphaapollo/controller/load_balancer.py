"""Choose the engine of each group of samples."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LoadBalancer:
    """Load balancer that counts the samples in flight on each engine.

    Among equally loaded engines the first one is chosen. `capacity`: maximum number of samples in flight per engine. A
    larger request waits for an idle engine.
    """

    def __init__(self, num_engines: int, capacity: int):
        self._capacity = capacity
        self._load = [0] * num_engines
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    @asynccontextmanager
    async def reserve_engine(self, num_samples: int) -> AsyncIterator[int]:
        """Context manager that waits, in order of arrival, until an engine has capacity for `num_samples` samples, and
        reserves it. Yields the engine's index."""
        slot: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_samples, slot))
        self._assign_waiting_requests()
        try:
            yield await slot
        finally:
            if not slot.cancelled():
                self._load[slot.result()] -= num_samples
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
