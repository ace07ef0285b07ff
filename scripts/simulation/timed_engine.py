"""Fake engine with simulated latency, for tests and for measurements without a model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from alphaapollo.engines.fake import FakeEngine
from alphaapollo.types import Completion, ImageInput, Sampling


@dataclass(eq=False)
class TimedFakeEngine(FakeEngine):
    """Fake engine with a constant time per token and a limited number of concurrent requests."""

    seconds_per_token: float = 0.0  # simulated time per token, independent of other requests; none for the prefill
    max_concurrent_requests: int | None = None  # including paused requests; None: unlimited

    def __post_init__(self) -> None:
        super().__post_init__()
        self._slots = asyncio.Semaphore(self.max_concurrent_requests or sys.maxsize)
        self._naps: set[asyncio.Task[None]] = set()  # sleeps that a pause cancels

    async def generate(
        self, token_ids: list[int], sampling: Sampling, request_id: str, images: Sequence[ImageInput] = ()
    ) -> Completion:
        async with self._slots:
            completion = await super().generate(token_ids, sampling, request_id, images)
            earlier = await self._sleep_and_track_versions(len(completion.token_ids))
        return replace(completion, weight_version=self._version, earlier_version_token_counts=tuple(earlier))

    async def _sleep_and_track_versions(self, num_tokens: int) -> list[tuple[int, int]]:
        """Sleep for the time of `num_tokens` tokens. Returns (weight version, number of tokens) for each earlier weight
        version, if the weights change meanwhile."""
        loop, sampled = asyncio.get_running_loop(), 0.0  # a float: a pause does not lose a partly sampled token
        earlier: list[tuple[int, int]] = []
        while True:
            await self._unpaused.wait()
            version, since = self._version, loop.time()
            nap = asyncio.ensure_future(asyncio.sleep((num_tokens - sampled) * self.seconds_per_token))
            self._naps.add(nap)
            try:
                await asyncio.wait((nap,))
            finally:
                nap.cancel()
                self._naps.discard(nap)
            if not nap.cancelled():
                return earlier
            sampled = min(num_tokens, sampled + (loop.time() - since) / self.seconds_per_token)
            await self._unpaused.wait()
            before = sum(count for _, count in earlier)
            if self._version != version and int(sampled) > before:
                earlier.append((version, int(sampled) - before))

    async def pause(self) -> None:
        await super().pause()
        for nap in self._naps:
            nap.cancel()
