"""Choose the engine of each group of samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np


class LoadBalancer:
    """Load balancer that counts the samples in flight on each engine.

    Among equally loaded engines the first one is chosen. `capacity`: maximum number of samples in flight per engine. A
    request for more samples waits for an idle engine."""

    def __init__(self, num_engines: int, capacity: int):
        self._load, self._capacity = np.zeros(num_engines, dtype=np.int64), capacity
        self._queue_lock, self._freed = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def reserve_engine(self, num_samples: int) -> AsyncIterator[int]:
        """Context manager that waits, in order of arrival, until an engine has capacity for `num_samples` samples, and
        reserves that capacity. Yields the engine's index."""
        async with self._queue_lock:
            engine = int(self._load.argmin())
            while self._load[engine] and self._load[engine] + num_samples > self._capacity:
                self._freed.clear()
                await self._freed.wait()
                engine = int(self._load.argmin())
            self._load[engine] += num_samples
        try:
            yield engine
        finally:
            self._load[engine] -= num_samples
            self._freed.set()
