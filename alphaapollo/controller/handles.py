"""Typed handles to the worker groups: every remote call is one of these methods, but for vLLM's
own weight transfer (ray_transfer.py).

    PolicyGroup   actor and reference model, one worker a training rank (with what every LoadedGroup has)
    CriticGroup   critic, likewise
    RewardModelGroup  trained reward model, likewise
    EngineGroup   rollout workers, one a vLLM engine

They are the same over Ray actors and in one process (see ranks.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from alphaapollo.config.schema import LoraForm
from alphaapollo.controller.load_balancer import LoadBalancer
from alphaapollo.controller.ranks import Ranks, WorkerDied, resolve
from alphaapollo.data.batch import Columns, MiniBatch, RankBatch
from alphaapollo.observability.spans import Span, start_spans, take_spans
from alphaapollo.observability.torch_spans import start_torch_spans, take_torch_spans
from alphaapollo.types import GroupRequest, TrajectoryGroup, WeightReceipt, WeightUpdate
from alphaapollo.utils.watchdog import remove_paths
from alphaapollo.weight_sync.digest import format_digest
from alphaapollo.weight_sync.verification import common_update

if TYPE_CHECKING:  # the driver never imports the workers: they bring torch models and vLLM
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.critic import CriticWorker
    from alphaapollo.workers.policy import PolicyWorker
    from alphaapollo.workers.process_group import RankPlacement
    from alphaapollo.workers.reward_model import RewardModelWorker

T = TypeVar("T")
W = TypeVar("W", bound="TrainedWorker")
L = TypeVar("L", bound="PolicyWorker | CriticWorker")


class TrainedWorker(Protocol):
    """What the workers of every trained model can."""

    placement: RankPlacement

    def offload(self) -> None: ...

    def save(self, folder: str) -> None: ...

    def written(self) -> Future[float]: ...

    def load(self, folder: str) -> None: ...

    def fingerprint(self) -> dict[str, tuple[int, float]]: ...

    def memory(self) -> dict[str, float]: ...


class TrainedGroup(Generic[W]):
    """A model that is trained. Batches are one for each group of `sequence_parallel` consecutive ranks, which share
    rows."""

    name: str  # in traces

    def __init__(self, ranks: Ranks[W], sequence_parallel: int = 1):
        self.ranks = ranks
        self.sequence_parallel = sequence_parallel

    async def offload(self) -> None:
        """The end of its phase on the GPUs: what is offloaded goes to host memory, and what is cached is given back."""
        await self.ranks.call(lambda worker: worker.offload())

    async def save(self, folder: str) -> None:
        """Begin to write weights, optimiser and schedule as they are now: a checkpoint, each rank its part."""
        await self.ranks.call(lambda worker: worker.save(folder))

    async def written(self) -> float:
        """The last save is written, by all ranks; the seconds that the slowest of them took, beside other work."""
        return float(max(await self.ranks.call(lambda worker: waited(worker))))

    async def load(self, folder: str) -> None:
        """Go on from what save wrote, by any number of ranks."""
        await self.ranks.call(lambda worker: worker.load(folder))

    async def fingerprint(self) -> dict[str, tuple[str, float]]:
        """Digest and norm of the weights that are trained, and of each of their moments."""
        own = await self.ranks.call(lambda worker: worker.fingerprint())
        parts = {name: list(zip(*(rank[name] for rank in own), strict=True)) for name in own[0]}
        return {name: (format_digest(sum(digests)), sum(squares) ** 0.5) for name, (digests, squares) in parts.items()}

    async def start_profile(self) -> None:
        """Every rank begins to record what torch does."""
        name = self.name
        await self.ranks.call(lambda worker: start_torch_spans(f"{name} {worker.placement.rank}"))

    async def take_profile(self) -> list[Span]:
        """What the ranks recorded; the recording ends."""
        name = self.name
        return joined(await self.ranks.call(lambda worker: take_torch_spans(f"{name} {worker.placement.rank}")))

    async def memory(self) -> dict[str, float]:
        """GiB, the largest over the ranks: rss_gib, rss_peak_gib and, on GPUs, cuda_gib, cuda_peak_gib."""
        return largest(await self.ranks.call(lambda worker: worker.memory()))

    async def close(self) -> None:
        await self.ranks.close()


async def waited(worker: TrainedWorker) -> float:
    """The seconds of its last save, when that is written."""
    return await asyncio.wrap_future(worker.written())


def probed(worker: PolicyWorker, token_ids: list[int]) -> list[float]:
    """Log-probs of the probe by a policy that rests then."""
    logprobs = worker.probe(token_ids)
    worker.offload()
    return logprobs


def released(worker: PolicyWorker) -> None:
    """What carried its weights is free, and it rests."""
    worker.release_weights()
    worker.offload()


async def confirmed(worker: RolloutWorker, version: int, folder: str) -> WeightReceipt:
    """What an engine holds, after it has taken what lies in `folder`."""
    if folder:
        await resolve(worker.receive_weights(folder))
    receipt: WeightReceipt = await resolve(worker.confirm_weights(version))
    return receipt


class LoadedGroup(TrainedGroup[L]):
    """One that gets its rows once an iteration. Columns (flat float32 arrays [sum responses]) are one a batch."""

    async def sharing_problem(self) -> str | None:
        """Why the model cannot compute a shared prompt once; None: it can."""
        return (await self.ranks.call(lambda worker: worker.sharing.problem))[0]

    async def load_batch(self, batches: Sequence[RankBatch]) -> None:
        """Send each rank its rows, once an iteration."""
        own = for_each_rank(batches, self.sequence_parallel)
        await self.ranks.call_each(lambda worker, batch: worker.load_batch(batch), own)


class PolicyGroup(LoadedGroup["PolicyWorker"]):
    """The policy and, where asked for, its reference and a teacher."""

    name = "policy"

    async def self_check_warnings(self) -> list[str]:
        """What its self-check at the start leaves to be said."""
        return (await self.ranks.call(lambda worker: worker.self_check_warnings))[0]

    async def compute_log_probs(self) -> list[np.ndarray]:
        """Log-probs of the loaded rows under the present weights."""
        return (await self.ranks.call(lambda worker: worker.compute_log_probs()))[:: self.sequence_parallel]

    async def compute_ref_log_probs(self, batches: Sequence[RankBatch] | None = None) -> list[np.ndarray]:
        """Log-probs of the loaded rows under the reference, or of others, which are not loaded."""
        if batches is None:
            columns = await self.ranks.call(lambda worker: worker.compute_ref_log_probs())
        else:
            own = for_each_rank(batches, self.sequence_parallel)
            columns = await self.ranks.call_each(lambda worker, batch: worker.compute_ref_log_probs(batch), own)
        return columns[:: self.sequence_parallel]

    async def compute_teacher_log_probs(self) -> list[np.ndarray]:
        """Log-probs of the loaded rows under the teacher."""
        return (await self.ranks.call(lambda worker: worker.compute_teacher_log_probs()))[:: self.sequence_parallel]

    async def update(
        self, columns: Sequence[Columns[np.ndarray]], steps: Sequence[list[MiniBatch]], skip_bad: bool = False
    ) -> dict[str, float]:
        """The optimiser steps of one iteration over the loaded rows that `steps` name; metrics over all ranks.
        skip_bad: leave out steps whose gradient is not finite, instead of FloatingPointError."""
        each = for_each_rank(list(zip(columns, steps, strict=True)), self.sequence_parallel)
        return (await self.ranks.call_each(lambda worker, own: worker.update(*own, skip_bad), each))[0]

    async def old_log_probs(self) -> list[np.ndarray]:
        """The log-probs that the last update took as the sampling policy's, of the loaded rows."""
        return (await self.ranks.call(lambda worker: worker.old_log_probs()))[:: self.sequence_parallel]

    async def hard_reset(self) -> None:
        """The policy becomes the reference, and the optimiser forgets."""
        await self.ranks.call(lambda worker: worker.hard_reset())

    async def send_weights(self, version: int) -> WeightUpdate:
        """Publish the weights (a collective of all ranks); what was sent, by its digest."""
        return common_update(await self.ranks.call(lambda worker: worker.send_weights(version)))

    async def release_weights(self) -> None:
        """The engines have confirmed: free what carried the last update, and rest."""
        await self.ranks.call(lambda worker: released(worker))

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Log-prob of each token after the first, at temperature 1; then the policy rests."""
        return (await self.ranks.call(lambda worker: probed(worker, token_ids)))[0]

    async def export(self, folder: str, form: LoraForm) -> None:
        """Write a Hugging Face folder; form: adapter: with LoRA peft's, of the adapters alone."""
        await self.ranks.call(lambda worker: worker.export(folder, form))


class CriticGroup(LoadedGroup["CriticWorker"]):
    """The critic."""

    name = "critic"

    async def compute_values(self) -> list[np.ndarray]:
        """Values of the loaded rows' response tokens under the present weights."""
        return (await self.ranks.call(lambda worker: worker.compute_values()))[:: self.sequence_parallel]

    async def update(self, columns: Sequence[Columns[np.ndarray]], skip_bad: bool = False) -> dict[str, float]:
        """As of the policy."""
        each = for_each_rank(columns, self.sequence_parallel)
        return (await self.ranks.call_each(lambda worker, own: worker.update(own, skip_bad), each))[0]


class RewardModelGroup:
    """The trained reward model. It has no state but its weights, which never change. Batches as in TrainedGroup."""

    def __init__(self, ranks: Ranks[RewardModelWorker], sequence_parallel: int = 1):
        self.ranks = ranks
        self.sequence_parallel = sequence_parallel

    async def compute_scores(self, batches: Sequence[RankBatch]) -> list[np.ndarray]:
        """The score of each row's last token, float32 [R] a batch."""
        own = for_each_rank(batches, self.sequence_parallel)
        scores = await self.ranks.call_each(lambda worker, batch: worker.compute_scores(batch), own)
        return scores[:: self.sequence_parallel]

    async def offload(self) -> None:
        """As of the policy."""
        await self.ranks.call(lambda worker: worker.offload())

    async def memory(self) -> dict[str, float]:
        return largest(await self.ranks.call(lambda worker: worker.memory()))

    async def close(self) -> None:
        await self.ranks.close()


class EngineGroup:
    """The rollout workers. A group stays whole on one engine, where its samples share their prompt's prefill."""

    def __init__(self, ranks: Ranks[RolloutWorker], samples_in_flight: int):
        self.ranks = ranks
        self.samples_in_flight = samples_in_flight  # an engine, at most: more would only queue inside it
        self.dead: set[int] = set()  # that have been found so, and not replaced
        self._loads = LoadBalancer(ranks.size, samples_in_flight)
        self._hold_weights: bool | None = None

    async def play(self, request: GroupRequest) -> TrajectoryGroup:
        """One group, on the least loaded engine as soon as that has room."""
        rank = await self._loads.take(request.num_samples)
        try:
            group: TrajectoryGroup = await self.ranks.call_one(rank, lambda worker: worker.generate(request))
            return group
        except WorkerDied:
            self.dead.add(rank)
            raise
        finally:
            self._loads.give_back(rank, request.num_samples)

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[int, TrajectoryGroup]]:
        """Run the requests; yields (index of the request, its group) as they end. A death is raised when all that the
        other engines play has ended."""

        async def run(index: int, request: GroupRequest) -> tuple[int, TrajectoryGroup]:
            return index, await self.play(request)

        tasks = [asyncio.ensure_future(run(index, request)) for index, request in enumerate(requests)]
        death: WorkerDied | None = None
        try:
            for done in asyncio.as_completed(tasks):
                try:
                    played = await done
                except WorkerDied as error:
                    death = death or error
                else:
                    yield played
            if death:
                raise death
        finally:
            for task in tasks:
                task.cancel()

    async def pause(self, keep_cache: bool = False) -> None:
        """Every engine stops between two tokens; what runs goes on after `resume`, under the weights of then."""
        await self.ranks.call(lambda worker: worker.pause(keep_cache))

    async def resume(self) -> None:
        """Every engine goes on."""
        await self.ranks.call(lambda worker: worker.resume())

    async def hold_weights(self) -> bool:
        """False for fake engines."""
        if self._hold_weights is None:  # it never changes
            self._hold_weights = all(await self.ranks.call(lambda worker: worker.holds_weights))
        return self._hold_weights

    async def log_probs(self, token_ids: list[int]) -> list[list[float]]:
        """Log-prob of each token after the first, from each engine."""
        return await self.ranks.call(lambda worker: worker.log_probs(token_ids))

    async def confirm_weights(self, version: int, folder: str = "") -> list[WeightReceipt]:
        """What each engine holds, after all of this version has come: with `folder`, which it then takes first, what a
        training rank wrote into the shared memory of its node."""
        return await self.ranks.call(lambda worker: confirmed(worker, version, folder))

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

    async def start_profile(self) -> None:
        """Every rollout worker begins to note what its episodes do."""
        await self.ranks.call(lambda _: start_spans())

    async def take_profile(self) -> list[Span]:
        """What they noted, and no more from now on."""
        return joined(await self.ranks.call(lambda _: take_spans()))

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


def joined(lists: Sequence[list[T]]) -> list[T]:
    """Those of all ranks in one list."""
    return [item for own in lists for item in own]


def largest(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest of each figure over the ranks."""
    return {name: max(own[name] for own in figures) for name in figures[0]}
