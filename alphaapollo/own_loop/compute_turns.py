"""Turns of a loop's training ranks and engines, which may share GPUs. Only one verb at a time uses the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from alphaapollo.controller.errors import WorkerDied
from alphaapollo.own_loop.adapters import Adapters
from alphaapollo.session.training import PolicySession
from alphaapollo.workers.adapter_slots import OWN


class ComputeTurns:
    """Turns in which either the training ranks or the engines on the same GPUs compute."""

    def __init__(self, session: PolicySession, adapters: Adapters, shares_gpus: bool):
        self._session, self._adapters, self._shares_gpus = session, adapters, shares_gpus
        self._ranks_lock, self._num_sampling = asyncio.Lock(), 0
        if session.publisher:
            session.workers.engines.replace_engine = self.replace_engine

    @asynccontextmanager
    async def use_ranks(self, adapter: str = OWN) -> AsyncIterator[None]:
        """Context manager in which the training ranks work, with this adapter in the model. Engines on the same GPUs
        free their memory first, and get the weights again before the next sample, or at once if samples wait."""
        async with self._ranks_lock:
            publisher = self._session.publisher
            if self._shares_gpus and publisher and publisher.engines_hold_weights:
                await self._session.hand_over(pauses_requests=True)
            await self._adapters.use(adapter)
            try:
                yield
            finally:
                if publisher and self._num_sampling and not publisher.engines_hold_weights:
                    await self.publish()

    @asynccontextmanager
    async def use_engines(self) -> AsyncIterator[None]:
        """Context manager in which the engines hold their weights. Ranks on the same GPUs wait until it ends."""
        publisher = self._session.require_publisher()
        if not self._shares_gpus and publisher.engines_hold_weights:
            yield
            return
        async with self._ranks_lock:
            if not publisher.engines_hold_weights:
                await self.publish()
            yield

    @asynccontextmanager
    async def sample(self) -> AsyncIterator[None]:
        """Context manager in which requests to the engines run. They pause while ranks on the same GPUs work."""
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1

    async def replace_engine(self, death: WorkerDied) -> None:
        """Replace an engine that died (WeightPublisher.replace_engine), in a turn of the ranks."""
        publisher = self._session.require_publisher()
        turn = self.use_ranks() if publisher.on_cpus else nullcontext()  # on GPUs, the caller may hold the lock already
        async with turn:
            await publisher.replace_engine(death)

    async def publish(self) -> dict[str, float]:
        """Publish the model's own weights. Call it in a turn of the ranks. Returns metrics of the weight sync."""
        self._session.require_publisher()
        state, version = await self._adapters.use(OWN), self._adapters.next_version()
        state.trained_version = version
        return await self._session.publish(version)
