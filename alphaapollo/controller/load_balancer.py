"""Assignment of requests, in order of arrival, to the least loaded engine."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque


class LoadBalancer:
    """Load balancer that counts the samples in flight on each engine.

    An assignment takes O(log(number of engines)) time. Among equally loaded engines the first one is chosen.

    Args:
        size: number of engines.
        capacity: maximum number of samples in flight per engine. A request with more samples waits for an idle engine.
    """

    def __init__(self, size: int, capacity: int):
        self._capacity = capacity
        self._load = [0] * size
        self._least = [(0, engine) for engine in range(size)]  # heap of (load, engine); outdated entries are skipped
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    async def acquire(self, samples: int) -> int:
        """Wait for capacity, in order of arrival, and return the index of the engine for `samples` samples."""
        slot: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((samples, slot))
        self._assign_waiting()
        try:
            return await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # an engine was assigned before the cancellation
                self.release(slot.result(), samples)
            raise

    def release(self, engine: int, samples: int) -> None:
        """Free the capacity of finished samples on an engine."""
        self._add(engine, -samples)
        self._assign_waiting()

    def _assign_waiting(self) -> None:
        while self._waiting:
            samples, slot = self._waiting[0]
            if not slot.done():
                engine = self._pick_least_loaded()
                if self._load[engine] and self._load[engine] + samples > self._capacity:
                    return
                self._add(engine, samples)
                slot.set_result(engine)
            self._waiting.popleft()

    def _pick_least_loaded(self) -> int:
        while self._least[0][0] != self._load[self._least[0][1]]:
            heapq.heappop(self._least)
        return self._least[0][1]

    def _add(self, engine: int, samples: int) -> None:
        self._load[engine] += samples
        heapq.heappush(self._least, (self._load[engine], engine))
