"""Typed handles to the worker groups: every remote call is one of these methods, but for vLLM's
own weight transfer (ray_transfer.py).

    PolicyGroup   actor and reference model, one worker a training rank
    CriticGroup   critic, likewise
    RewardModelGroup  trained reward model, likewise
    EngineGroup   rollout workers, one a vLLM engine

They are the same over Ray actors and in one process (see ranks.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from alphaapollo.config.schema import LoraForm
from alphaapollo.controller.ranks import Ranks
from alphaapollo.data.batch import Columns, RankBatch
from alphaapollo.types import GroupRequest, TrajectoryGroup, WeightReceipt, WeightUpdate
from alphaapollo.watchdog import remove_paths
from alphaapollo.weights.proof import agreed

if TYPE_CHECKING:  # the driver never imports the workers: they bring torch models and vLLM
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.critic import CriticWorker
    from alphaapollo.workers.policy import PolicyWorker
    from alphaapollo.workers.reward_model import RewardModelWorker

T = TypeVar("T")


class PolicyGroup:
    """The policy and, where asked for, its reference. Batches, and columns (flat float32 arrays [sum responses]), are
    one for each group of `sequence_parallel` consecutive ranks, which share rows."""

    def __init__(self, ranks: Ranks[PolicyWorker], sequence_parallel: int = 1):
        self.ranks = ranks
        self.sequence_parallel = sequence_parallel

    async def doubts(self) -> list[str]:
        """What its self-check at the start leaves to be said."""
        return (await self.ranks.call(lambda worker: worker.doubts))[0]

    async def load_batch(self, batches: Sequence[RankBatch]) -> None:
        """Send each rank its rows, once an iteration."""
        own = for_each_rank(batches, self.sequence_parallel)
        await self.ranks.call_each(lambda worker, batch: worker.load_batch(batch), own)

    async def compute_log_probs(self) -> list[np.ndarray]:
        """Log-probs of the loaded rows under the present weights."""
        return (await self.ranks.call(lambda worker: worker.compute_log_probs()))[:: self.sequence_parallel]

    async def compute_ref_log_probs(self) -> list[np.ndarray]:
        """Log-probs of the loaded rows under the reference."""
        return (await self.ranks.call(lambda worker: worker.compute_ref_log_probs()))[:: self.sequence_parallel]

    async def update(self, columns: Sequence[Columns[np.ndarray]]) -> dict[str, float]:
        """The optimiser steps of one iteration; metrics over all ranks."""
        each = for_each_rank(columns, self.sequence_parallel)
        return (await self.ranks.call_each(lambda worker, own: worker.update(own), each))[0]

    async def old_log_probs(self) -> list[np.ndarray]:
        """The log-probs that the last update took as the sampling policy's, of the loaded rows."""
        return (await self.ranks.call(lambda worker: worker.old_log_probs()))[:: self.sequence_parallel]

    async def hard_reset(self) -> None:
        """The policy becomes the reference, and the optimiser forgets."""
        await self.ranks.call(lambda worker: worker.hard_reset())

    async def send_weights(self, version: int) -> WeightUpdate:
        """Publish the weights (a collective of all ranks); what was sent, by its digest."""
        return agreed(await self.ranks.call(lambda worker: worker.send_weights(version)))

    async def release_weights(self) -> None:
        """The engines have confirmed: free what carried the last update."""
        await self.ranks.call(lambda worker: worker.release_weights())

    async def rest(self) -> None:
        """The end of its phase on the GPUs: what is offloaded goes to host memory, and what is cached is given back."""
        await self.ranks.call(lambda worker: worker.rest())

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Log-prob of each token after the first, at temperature 1."""
        return (await self.ranks.call(lambda worker: worker.probe(token_ids)))[0]

    async def save(self, folder: str) -> None:
        """Write weights, optimiser and schedule: a checkpoint, each rank its part."""
        await self.ranks.call(lambda worker: worker.save(folder))

    async def load(self, folder: str) -> None:
        """Go on from what save wrote, by any number of ranks."""
        await self.ranks.call(lambda worker: worker.load(folder))

    async def export(self, folder: str, form: LoraForm) -> None:
        """Write a Hugging Face folder; form: adapter: with LoRA peft's, of the adapters alone."""
        await self.ranks.call(lambda worker: worker.export(folder, form))

    async def memory(self) -> dict[str, float]:
        """GiB, the largest over the ranks: rss_gib, rss_peak_gib and, on GPUs, cuda_gib, cuda_peak_gib."""
        return largest(await self.ranks.call(lambda worker: worker.memory()))

    async def close(self) -> None:
        await self.ranks.close()


class CriticGroup:
    """The critic; batches and columns as in PolicyGroup."""

    def __init__(self, ranks: Ranks[CriticWorker], sequence_parallel: int = 1):
        self.ranks = ranks
        self.sequence_parallel = sequence_parallel

    async def load_batch(self, batches: Sequence[RankBatch]) -> None:
        own = for_each_rank(batches, self.sequence_parallel)
        await self.ranks.call_each(lambda worker, batch: worker.load_batch(batch), own)

    async def compute_values(self) -> list[np.ndarray]:
        """Values of the loaded rows' response tokens under the present weights."""
        return (await self.ranks.call(lambda worker: worker.compute_values()))[:: self.sequence_parallel]

    async def rest(self) -> None:
        """As of the policy."""
        await self.ranks.call(lambda worker: worker.rest())

    async def update(self, columns: Sequence[Columns[np.ndarray]]) -> dict[str, float]:
        each = for_each_rank(columns, self.sequence_parallel)
        return (await self.ranks.call_each(lambda worker, own: worker.update(own), each))[0]

    async def save(self, folder: str) -> None:
        """Write weights, optimiser and schedule: a checkpoint, each rank its part."""
        await self.ranks.call(lambda worker: worker.save(folder))

    async def load(self, folder: str) -> None:
        """Go on from what save wrote, by any number of ranks."""
        await self.ranks.call(lambda worker: worker.load(folder))

    async def memory(self) -> dict[str, float]:
        return largest(await self.ranks.call(lambda worker: worker.memory()))

    async def close(self) -> None:
        await self.ranks.close()


class RewardModelGroup:
    """The trained reward model. It has no state but its weights, which never change. Batches as in PolicyGroup."""

    def __init__(self, ranks: Ranks[RewardModelWorker], sequence_parallel: int = 1):
        self.ranks = ranks
        self.sequence_parallel = sequence_parallel

    async def compute_scores(self, batches: Sequence[RankBatch]) -> list[np.ndarray]:
        """The score of each row's last token, float32 [R] a batch."""
        own = for_each_rank(batches, self.sequence_parallel)
        scores = await self.ranks.call_each(lambda worker, batch: worker.compute_scores(batch), own)
        return scores[:: self.sequence_parallel]

    async def rest(self) -> None:
        """As of the policy."""
        await self.ranks.call(lambda worker: worker.rest())

    async def memory(self) -> dict[str, float]:
        return largest(await self.ranks.call(lambda worker: worker.memory()))

    async def close(self) -> None:
        await self.ranks.close()


class EngineGroup:
    """The rollout workers. A group stays whole on one engine, where its samples share their prompt's prefill."""

    def __init__(self, ranks: Ranks[RolloutWorker], samples_in_flight: int):
        self.ranks = ranks
        self.samples_in_flight = samples_in_flight  # an engine, at most: more would only queue inside it

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[int, TrajectoryGroup]]:
        """Run the requests; yields (index of the request, its group) as they end, each to the least loaded engine."""
        load = [0] * self.ranks.size
        room = asyncio.Condition()

        async def run(index: int, request: GroupRequest) -> tuple[int, TrajectoryGroup]:
            async with room:
                await room.wait_for(lambda: min(load) == 0 or min(load) + request.num_samples <= self.samples_in_flight)
                rank = load.index(min(load))
                load[rank] += request.num_samples
            try:
                return index, await self.ranks.call_one(rank, lambda worker: worker.generate(request))
            finally:
                async with room:
                    load[rank] -= request.num_samples
                    room.notify_all()

        tasks = [asyncio.ensure_future(run(index, request)) for index, request in enumerate(requests)]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()

    async def hold_weights(self) -> bool:
        """False for fake engines."""
        return all(await self.ranks.call(lambda worker: worker.holds_weights))

    async def log_probs(self, token_ids: list[int]) -> list[list[float]]:
        """Log-prob of each token after the first, from each engine."""
        return await self.ranks.call(lambda worker: worker.log_probs(token_ids))

    async def receive_weights(self, folder: str) -> None:
        """Every engine takes what a training rank wrote into the shared memory of its node."""
        await self.ranks.call(lambda worker: worker.receive_weights(folder))

    async def confirm_weights(self, version: int) -> list[WeightReceipt]:
        """What each engine holds, after all of this version has come."""
        return await self.ranks.call(lambda worker: worker.confirm_weights(version))

    async def sleep(self) -> None:
        """The GPUs are the trainers' until the next publish (nothing on a CPU)."""
        await self.ranks.call(lambda worker: worker.sleep())

    async def wake_weights(self) -> None:
        """Memory for the weights that are to come."""
        await self.ranks.call(lambda worker: worker.wake_weights())

    async def wake_cache(self) -> None:
        """The GPUs are the engines'."""
        await self.ranks.call(lambda worker: worker.wake_cache())

    @asynccontextmanager
    async def cache_released(self) -> AsyncIterator[None]:
        """A trainer's phase without a publish after it: engines keep their weights and lend their caches' memory."""
        await self.ranks.call(lambda worker: worker.release_cache())
        yield
        await self.wake_cache()

    async def memory(self) -> dict[str, float]:
        return largest(await self.ranks.call(lambda worker: worker.memory()))

    async def close(self, cleanup: Sequence[str] = ()) -> None:
        """Shut the engines down first: an engine's core is a process of its own. `cleanup`: folders that each removes
        on its node."""
        await self.ranks.call(lambda worker: worker.close())
        await self.ranks.call(lambda _: remove_paths(map(Path, cleanup)))
        await self.ranks.close()


def for_each_rank(items: Sequence[T], sequence_parallel: int) -> list[T]:
    """Ranks that share rows get the same item."""
    return [item for item in items for _ in range(sequence_parallel)]


def largest(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest of each figure over the ranks."""
    return {name: max(own[name] for own in figures) for name in figures[0]}
