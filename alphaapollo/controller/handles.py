"""Typed handles to worker groups: every remote call is one of these methods, except vLLM's own weight transfer
(ray_transfer.py).

    PolicyGroup        actor and reference model, one worker per training rank
    CriticGroup        critic, likewise
    RewardModelGroup   trained reward model, likewise
    FinetuningGroup    the model in fine-tuning, likewise
    EngineGroup        rollout workers, one per inference engine

They are the same over Ray actors and in one process (ranks.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from alphaapollo.config.schema import LoraForm
from alphaapollo.controller.load_balancer import LoadBalancer
from alphaapollo.controller.ranks import Ranks, WorkerDied
from alphaapollo.data.batch import Columns, FinetuningStep, MiniBatch, RankBatch
from alphaapollo.observability.spans import Span, start_spans, take_spans
from alphaapollo.observability.torch_spans import start_torch_spans, take_torch_spans
from alphaapollo.types import GroupRequest, TrajectoryGroup, WeightReceipt, WeightUpdate
from alphaapollo.utils.watchdog import remove_paths
from alphaapollo.weight_sync.digest import format_digest
from alphaapollo.weight_sync.verification import merge_updates

if TYPE_CHECKING:
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.critic import CriticWorker
    from alphaapollo.workers.finetuning_worker import FinetuningWorker  # noqa: F401  (used in a string)
    from alphaapollo.workers.model_worker import TrainingWorker
    from alphaapollo.workers.policy import PolicyWorker
    from alphaapollo.workers.reward_model import RewardModelWorker

T = TypeVar("T")
W = TypeVar("W", bound="TrainingWorker | RewardModelWorker | RolloutWorker")
M = TypeVar("M", bound="TrainingWorker | RewardModelWorker")
L = TypeVar("L", bound="TrainingWorker")
R = TypeVar("R", bound="PolicyWorker | CriticWorker")
B = TypeVar("B", bound=RankBatch)


class WorkerGroup(Generic[W]):
    """The workers of one role."""

    def __init__(self, ranks: Ranks[W]):
        self.ranks = ranks

    async def memory(self) -> dict[str, float]:
        """GiB, the maximum over the ranks: rss_gib, rss_peak_gib and, on GPUs, cuda_gib, cuda_peak_gib."""
        every = await self.ranks.call(lambda worker: worker.memory())
        return {name: max(own[name] for own in every) for name in every[0]}

    async def close(self) -> None:
        """End the workers' processes."""
        await self.ranks.close()


class ModelGroup(WorkerGroup[M]):
    """A model on the training ranks. Each group of `sequence_parallel` consecutive ranks shares rows and gets one
    batch."""

    def __init__(self, ranks: Ranks[M], sequence_parallel: int = 1):
        super().__init__(ranks)
        self.sequence_parallel = sequence_parallel

    async def offload(self) -> None:
        """End the model's phase on the GPUs: move what is offloaded to host memory and free cached memory."""
        await self.ranks.call(lambda worker: worker.offload())

    async def _call_each(self, function: Callable[[M, T], Any], items: Sequence[T]) -> list[Any]:
        """Call the function with each item on the ranks that share it. Returns one result per item."""
        own = [item for item in items for _ in range(self.sequence_parallel)]
        return (await self.ranks.call_each(function, own))[:: self.sequence_parallel]

    async def _call(self, function: Callable[[M], Any]) -> list[Any]:
        """Call the function on every rank. Returns one result per batch."""
        return (await self.ranks.call(function))[:: self.sequence_parallel]


class TrainedGroup(ModelGroup[L]):
    """A model that is trained."""

    name: str  # in traces

    async def save(self, folder: str) -> None:
        """Begin to write a checkpoint of the present weights, optimizer and schedule, each rank its part."""
        await self.ranks.call(lambda worker: worker.save(folder))

    async def wait_for_save(self) -> float:
        """Wait until all ranks have written the last save. Returns the seconds of the slowest."""
        return float(max(await self.ranks.call(lambda worker: wait_for_save(worker))))

    async def load(self, folder: str) -> None:
        """Load a checkpoint, written by any number of ranks."""
        await self.ranks.call(lambda worker: worker.load(folder))

    async def export(self, folder: str, form: LoraForm) -> None:
        """Write a Hugging Face folder. form=adapter, with LoRA: peft's folder with the adapters only."""
        await self.ranks.call(lambda worker: worker.export(folder, form))

    async def fingerprint(self) -> dict[str, tuple[str, float]]:
        """Digest and norm of the trained weights, and of each of their optimizer moments."""
        own = await self.ranks.call(lambda worker: worker.fingerprint())
        parts = {name: list(zip(*(rank[name] for rank in own), strict=True)) for name in own[0]}
        return {name: (format_digest(sum(digests)), sum(squares) ** 0.5) for name, (digests, squares) in parts.items()}

    async def start_profile(self) -> None:
        """Record torch's operations on every rank."""
        name = self.name
        await self.ranks.call(lambda worker: start_torch_spans(f"{name} {worker.placement.rank}"))

    async def take_profile(self) -> list[Span]:
        """Stop recording, and return the spans of all ranks."""
        name = self.name
        return flatten(await self.ranks.call(lambda worker: take_torch_spans(f"{name} {worker.placement.rank}")))


async def wait_for_save(worker: TrainingWorker) -> float:
    """Seconds of the worker's last save, once it is written."""
    return await asyncio.wrap_future(worker.get_save_future())


class FinetuningGroup(TrainedGroup["FinetuningWorker[B]"], Generic[B]):
    """The model in fine-tuning."""

    name = "trainer"

    async def self_check_warnings(self) -> list[str]:
        """Warnings of the self-check at the start."""
        return (await self.ranks.call(lambda worker: worker.self_check_warnings))[0]

    async def step(self, batches: Sequence[B], skip_bad: bool) -> FinetuningStep:
        """One optimizer step over all ranks. skip_bad: leave out a step with a non-finite gradient instead of raising
        FloatingPointError."""
        return (await self._call_each(lambda worker, batch: worker.step(batch, skip_bad), batches))[0]

    async def evaluate(self, batches: Sequence[B]) -> dict[str, float]:
        """The sums over all ranks that a step would report for these batches."""
        return (await self._call_each(lambda worker, batch: worker.evaluate(batch), batches))[0]


class RLGroup(TrainedGroup[R]):
    """A model trained on rollouts, which gets its rows once per iteration. Columns (flat float32 arrays [sum
    responses]) are one per batch."""

    async def find_sharing_error(self) -> str | None:
        """Why the model cannot compute a shared prompt once; None: it can."""
        return (await self.ranks.call(lambda worker: worker.sharing.unsupported_reason))[0]

    async def load_batch(self, batches: Sequence[RankBatch]) -> None:
        """Send each rank its rows, once per iteration."""
        await self._call_each(lambda worker, batch: worker.load_batch(batch), batches)


class PolicyGroup(RLGroup["PolicyWorker"]):
    """The policy and, if the run needs them, its reference and a teacher."""

    name = "policy"

    async def self_check_warnings(self) -> list[str]:
        """Warnings of the self-check at the start."""
        return (await self.ranks.call(lambda worker: worker.self_check_warnings))[0]

    async def compute_log_probs(self) -> list[np.ndarray]:
        """Log-probs of the loaded rows under the current weights."""
        return await self._call(lambda worker: worker.compute_log_probs())

    async def compute_ref_log_probs(self, batches: Sequence[RankBatch] | None = None) -> list[np.ndarray]:
        """Log-probs under the reference, of the loaded rows or of `batches`."""
        if batches is None:
            return await self._call(lambda worker: worker.compute_ref_log_probs())
        return await self._call_each(lambda worker, batch: worker.compute_ref_log_probs(batch), batches)

    async def compute_teacher_log_probs(self) -> list[np.ndarray]:
        """Log-probs of the loaded rows under the teacher."""
        return await self._call(lambda worker: worker.compute_teacher_log_probs())

    async def update(
        self, columns: Sequence[Columns[np.ndarray]], steps: Sequence[list[MiniBatch]], skip_bad: bool = False
    ) -> dict[str, float]:
        """Run the optimizer steps of one iteration over the loaded rows that `steps` name. Returns metrics over all
        ranks. skip_bad: leave out steps with a non-finite gradient instead of raising FloatingPointError."""
        each = list(zip(columns, steps, strict=True))
        return (await self._call_each(lambda worker, own: worker.update(*own, skip_bad), each))[0]

    async def get_old_log_probs(self) -> list[np.ndarray]:
        """Log-probs of the loaded rows that the last update used as the sampling policy's."""
        return await self._call(lambda worker: worker.get_old_log_probs())

    async def hard_reset(self) -> None:
        """Copy the policy to the reference and reset the optimizer."""
        await self.ranks.call(lambda worker: worker.hard_reset())

    async def send_weights(self, version: int) -> WeightUpdate:
        """Publish the weights (a collective of all ranks). Returns the digest of what was sent."""
        return merge_updates(await self.ranks.call(lambda worker: worker.send_weights(version)))

    async def release_weights(self) -> None:
        """Free the buffers of the last weight sync, after the engines have confirmed it, and offload the policy."""
        await self.ranks.call(lambda worker: worker.release_weights())

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Log-prob of each token after the first, at temperature 1. Offloads the policy afterwards."""
        return (await self.ranks.call(lambda worker: worker.probe(token_ids)))[0]


class CriticGroup(RLGroup["CriticWorker"]):
    """The critic."""

    name = "critic"

    async def compute_values(self) -> list[np.ndarray]:
        """Values of the loaded rows' response tokens under the current weights."""
        return await self._call(lambda worker: worker.compute_values())

    async def update(self, columns: Sequence[Columns[np.ndarray]], skip_bad: bool = False) -> dict[str, float]:
        """Run the optimizer steps of one iteration, as PolicyGroup.update does."""
        return (await self._call_each(lambda worker, own: worker.update(own, skip_bad), columns))[0]


class RewardModelGroup(ModelGroup["RewardModelWorker"]):
    """The trained reward model; its weights never change."""

    async def compute_scores(self, batches: Sequence[RankBatch]) -> list[np.ndarray]:
        """The score of each row's last token, float32 [R] per batch."""
        return await self._call_each(lambda worker, batch: worker.compute_scores(batch), batches)


class EngineGroup(WorkerGroup["RolloutWorker"]):
    """The rollout workers. All samples of a group run on one engine, where they share their prompt's prefill."""

    def __init__(self, ranks: Ranks[RolloutWorker], samples_in_flight: int):
        super().__init__(ranks)
        self.samples_in_flight = samples_in_flight  # maximum per engine; more would queue inside it
        self.dead: set[int] = set()  # indices of dead engines that have not been replaced
        self._balancer = LoadBalancer(ranks.size, samples_in_flight)

    async def generate_group(self, request: GroupRequest) -> TrajectoryGroup:
        """Generate one group on the least loaded engine, once it has capacity."""
        rank = await self._balancer.acquire(request.num_samples)
        try:
            group: TrajectoryGroup = await self.ranks.call_one(rank, lambda worker: worker.generate(request))
            return group
        except WorkerDied:
            self.dead.add(rank)
            raise
        finally:
            self._balancer.release(rank, request.num_samples)

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[int, TrajectoryGroup]]:
        """Run the requests. Yields (index of the request, its group) as they end. If an engine dies, WorkerDied is
        raised after the requests on the other engines have ended."""

        async def run(index: int, request: GroupRequest) -> tuple[int, TrajectoryGroup]:
            return index, await self.generate_group(request)

        tasks = [asyncio.ensure_future(run(index, request)) for index, request in enumerate(requests)]
        death: WorkerDied | None = None
        try:
            for done in asyncio.as_completed(tasks):
                try:
                    result = await done
                except WorkerDied as error:
                    death = death or error
                else:
                    yield result
            if death:
                raise death
        finally:
            for task in tasks:
                task.cancel()

    async def pause(self) -> None:
        """Pause every engine between two tokens. Requests continue after `resume`, under the weights at that time."""
        await self.ranks.call(lambda worker: worker.pause())

    async def resume(self) -> None:
        """Resume every engine."""
        await self.ranks.call(lambda worker: worker.resume())

    async def hold_weights(self) -> bool:
        """Whether the engines have weights; fake engines do not."""
        return all(await self.ranks.call(lambda worker: worker.has_weights))

    async def log_probs(self, token_ids: list[int]) -> list[list[float]]:
        """Log-prob of each token after the first, from each engine."""
        return await self.ranks.call(lambda worker: worker.log_probs(token_ids))

    async def confirm_weights(self, version: int, folder: str = "") -> list[WeightReceipt]:
        """Wait until each engine has all weights of this version, and return their digests. folder: shared memory from
        which the engine loads them first, written by a training rank on its node."""
        return await self.ranks.call(lambda worker: worker.confirm_weights(version, folder))

    async def sleep(self) -> None:
        """Free the GPUs for the trainers until the next publish. No effect on a CPU."""
        await self.ranks.call(lambda worker: worker.sleep())

    async def wake_weights(self) -> None:
        """Allocate memory for the next weights."""
        await self.ranks.call(lambda worker: worker.wake_weights())

    async def wake_cache(self) -> None:
        """Allocate the KV cache."""
        await self.ranks.call(lambda worker: worker.wake_cache())

    @asynccontextmanager
    async def cache_released(self) -> AsyncIterator[None]:
        """Free the KV caches for a phase of the trainers without a publish after it. Engines keep their weights."""
        await self.ranks.call(lambda worker: worker.release_cache())
        yield
        await self.wake_cache()

    async def start_profile(self) -> None:
        """Record the episodes of every rollout worker."""
        await self.ranks.call(lambda _: start_spans())

    async def take_profile(self) -> list[Span]:
        """Stop recording, and return the spans of all workers."""
        return flatten(await self.ranks.call(lambda _: take_spans()))

    async def close(self, cleanup: Sequence[str] = ()) -> None:
        """Shut down the engines (their cores are separate processes), then the workers. cleanup: folders that each
        worker removes on its node."""
        await self.ranks.call(lambda worker: worker.close())
        await self.ranks.call(lambda _: remove_paths(map(Path, cleanup)))
        await self.ranks.close()


def flatten(lists: Sequence[list[T]]) -> list[T]:
    """The items of all ranks in one list."""
    return [item for own in lists for item in own]
