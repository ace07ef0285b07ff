"""The workers of a fine-tuning, one a training rank: over Ray (ray_tuning_crew.py), or one in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from alphaapollo.config.schema import LoraForm
from alphaapollo.controller.handles import TrainedGroup, for_each_rank
from alphaapollo.controller.ranks import LocalRanks, Ranks, resolve
from alphaapollo.controller.worker_counts import RankCounts
from alphaapollo.data.batch import Stepped, TunedBatch

if TYPE_CHECKING:
    from alphaapollo.workers.finetuning_worker import TunedWorker
    from alphaapollo.workers.process_group import RankPlacement

W = TypeVar("W")
A = TypeVar("A")
B = TypeVar("B", bound=TunedBatch)
ROLE = "trainer"


class TunedGroup(TrainedGroup["TunedWorker[B]"], Generic[B]):
    """The model in fine-tuning."""

    name = ROLE

    async def self_check_warnings(self) -> list[str]:
        """What its self-check at the start leaves to be said."""
        return (await self.ranks.call(lambda worker: worker.self_check_warnings))[0]

    async def step(self, batches: Sequence[B], skip_bad: bool) -> Stepped:
        """One optimiser step, over all ranks. skip_bad: leave it out where its gradient is not finite, instead of
        FloatingPointError."""
        own = for_each_rank(batches, self.sequence_parallel)
        return (await self.ranks.call_each(lambda worker, batch: worker.step(batch, skip_bad), own))[0]

    async def evaluate(self, batches: Sequence[B]) -> dict[str, float]:
        """What a step would report of these batches: sums over all ranks."""
        own = for_each_rank(batches, self.sequence_parallel)
        return (await self.ranks.call_each(lambda worker, batch: worker.evaluate(batch), own))[0]

    async def export(self, folder: str, form: LoraForm) -> None:
        """Write a Hugging Face folder; form: adapter: with LoRA peft's, of the adapters alone."""
        await self.ranks.call(lambda worker: worker.export(folder, form))


@dataclass(frozen=True)
class TuningPlan(Generic[B]):
    """How many ranks, where, and how the worker of each is built (in its own process)."""

    counts: RankCounts
    build: Callable[[RankPlacement], TunedWorker[B]]


class TuningCrew(Protocol[B]):
    """The workers of a run."""

    trainer: TunedGroup[B]

    @property
    def ranks(self) -> list[Ranks[Any]]:
        """Those of all roles: there is one."""
        ...

    @property
    def needed(self) -> dict[str, int]:
        """Processes besides the workers without which nothing goes on: pid by name."""
        ...

    async def close(self) -> None:
        """End every process that was started, within seconds."""
        ...


class ThreadRanks(LocalRanks[W]):
    """One worker in this process, in a thread of its own: it computes while the loop does what goes on beside it
    (checkpoints, a signal). torch knows its threads and its GPU by thread, so all of the worker happens there."""

    def __init__(self, build: Callable[[], W]):
        self._thread = ThreadPoolExecutor(1, ROLE)
        try:
            super().__init__(self._thread.submit(build).result())
        except BaseException:
            self._thread.shutdown()
            raise
        self.role = ROLE

    async def call_each(self, function: Callable[[W, A], Any], items: Sequence[A]) -> list[Any]:
        with self._calling(function):
            return [await self._there(lambda: function(self.worker, items[0]))]

    async def call_one(self, rank: int, function: Callable[[W], Any]) -> Any:
        with self._calling(function):
            return await self._there(lambda: function(self.worker))

    async def _there(self, function: Callable[[], Any]) -> Any:
        return await resolve(await asyncio.wrap_future(self._thread.submit(function)))

    async def close(self) -> None:
        worker: Any = self.worker
        await self._there(worker.close)
        self._thread.shutdown()


class LocalTuning(Generic[B]):
    """The one rank, in this process."""

    def __init__(self, plan: TuningPlan[B]):
        from alphaapollo.workers.process_group import ALONE, RankPlacement

        counts = plan.counts
        assert counts.num_ranks == 1, "the checks see to it"
        place = RankPlacement(0, 1, ALONE, counts.device, counts.threads)
        self.trainer: TunedGroup[B] = TunedGroup(ThreadRanks(lambda: plan.build(place)))

    @property
    def ranks(self) -> list[Ranks[Any]]:
        return [self.trainer.ranks]

    @property
    def needed(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        await self.trainer.close()
