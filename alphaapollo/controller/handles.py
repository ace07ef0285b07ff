"""Typed handles to worker groups. Every remote call is a method of a handle, except vLLM's weight transfer
(ray_transfer.py).

    PolicyGroup        actor and reference model, one worker per training rank
    CriticGroup        critic, one worker per training rank
    RewardModelGroup   trained reward model, one worker per training rank
    FinetuningGroup    model in fine-tuning, one worker per training rank
    EngineGroup        rollout workers, one per inference engine

The handles work with Ray actors and with workers in this process (ranks.py).
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
from alphaapollo.data.batch import Columns, FinetuningStepResult, MiniBatch, RankBatch
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
    """Handle to the workers of one role."""

    def __init__(self, ranks: Ranks[W]):
        self.ranks = ranks

    async def memory(self) -> dict[str, float]:
        """Return memory in GiB, maximum over the ranks: rss_gib, rss_peak_gib; on GPUs also cuda_gib, cuda_peak_gib."""
        every = await self.ranks.call(lambda worker: worker.memory())
        return {name: max(metrics[name] for metrics in every) for name in every[0]}

    async def close(self) -> None:
        """End the workers' processes."""
        await self.ranks.close()


class ModelGroup(WorkerGroup[M]):
    """Handle to a model on the training ranks. Each group of `sequence_parallel` consecutive ranks shares its rows and
    receives one batch."""

    def __init__(self, ranks: Ranks[M], sequence_parallel: int = 1):
        super().__init__(ranks)
        self.sequence_parallel = sequence_parallel

    async def offload(self) -> None:
        """End the model's phase on the GPUs: move its offloaded tensors to host memory and free cached GPU memory."""
        await self.ranks.call(lambda worker: worker.offload())

    async def _call_each(self, function: Callable[[M, T], Any], items: Sequence[T]) -> list[Any]:
        """Call the function with each item on the ranks that share the item. Returns one result per item."""
        items_of_ranks = [item for item in items for _ in range(self.sequence_parallel)]
        return (await self.ranks.call_each(function, items_of_ranks))[:: self.sequence_parallel]

    async def _call(self, function: Callable[[M], Any]) -> list[Any]:
        """Call the function on every rank. Returns one result per batch."""
        return (await self.ranks.call(function))[:: self.sequence_parallel]


class TrainedGroup(ModelGroup[L]):
    """Handle to a model that is trained."""

    name: str  # name in traces

    async def save(self, folder: str) -> None:
        """Start writing a checkpoint of the current weights, optimizer and schedule. Each rank writes its shard."""
        await self.ranks.call(lambda worker: worker.save(folder))

    async def wait_for_save(self) -> float:
        """Wait until all ranks have written the last checkpoint. Returns the seconds of the slowest rank."""
        return float(max(await self.ranks.call(lambda worker: wait_for_save(worker))))

    async def load(self, folder: str) -> None:
        """Load a checkpoint that any number of ranks may have written."""
        await self.ranks.call(lambda worker: worker.load(folder))

    async def export(self, folder: str, form: LoraForm) -> None:
        """Write the model as a Hugging Face folder. form=adapter (LoRA only): write a peft folder with the adapters."""
        await self.ranks.call(lambda worker: worker.export(folder, form))

    async def fingerprint(self) -> dict[str, tuple[str, float]]:
        """Return (digest, norm) of the trained weights and of each of their optimizer moments, by name."""
        every = await self.ranks.call(lambda worker: worker.compute_fingerprints())
        parts = {name: list(zip(*(rank[name] for rank in every), strict=True)) for name in every[0]}
        return {name: (format_digest(sum(digests)), sum(squares) ** 0.5) for name, (digests, squares) in parts.items()}

    async def start_profile(self) -> None:
        """Start recording torch operations on every rank."""
        name = self.name
        await self.ranks.call(lambda worker: start_torch_spans(f"{name} {worker.placement.rank}"))

    async def take_profile(self) -> list[Span]:
        """Stop recording and return the spans of all ranks."""
        name = self.name
        return flatten(await self.ranks.call(lambda worker: take_torch_spans(f"{name} {worker.placement.rank}")))


async def wait_for_save(worker: TrainingWorker) -> float:
    """Wait until the worker's last checkpoint is written. Returns the seconds of writing."""
    return await asyncio.wrap_future(worker.get_save_future())


class FinetuningGroup(TrainedGroup["FinetuningWorker[B]"], Generic[B]):
    """Handle to the model in fine-tuning."""

    name = "trainer"

    async def self_check_warnings(self) -> list[str]:
        """Return the warnings of the self-check at the start."""
        return (await self.ranks.call(lambda worker: worker.self_check_warnings))[0]

    async def step(self, batches: Sequence[B], skip_bad: bool) -> FinetuningStepResult:
        """Run one optimizer step over all ranks and return its metrics.

        skip_bad: skip a step with a non-finite gradient instead of raising FloatingPointError.
        """
        return (await self._call_each(lambda worker, batch: worker.step(batch, skip_bad), batches))[0]

    async def evaluate(self, batches: Sequence[B]) -> dict[str, float]:
        """Return the metrics that a step would report for these batches, summed over all ranks."""
        return (await self._call_each(lambda worker, batch: worker.evaluate(batch), batches))[0]


class RLGroup(TrainedGroup[R]):
    """Handle to a model that is trained on rollouts. It receives its rows once per iteration. Columns are flat float32
    arrays [sum of response lengths], one per batch."""

    async def find_sharing_error(self) -> str | None:
        """Return why the model cannot compute a shared prompt only once, or None if it can."""
        return (await self.ranks.call(lambda worker: worker.sharing.unsupported_reason))[0]

    async def load_batch(self, batches: Sequence[RankBatch]) -> None:
        """Send each rank its rows, once per iteration."""
        await self._call_each(lambda worker, batch: worker.load_batch(batch), batches)


class PolicyGroup(RLGroup["PolicyWorker"]):
    """Handle to the policy and, if the run needs them, its reference and a teacher."""

    name = "policy"

    async def self_check_warnings(self) -> list[str]:
        """Return the warnings of the self-check at the start."""
        return (await self.ranks.call(lambda worker: worker.self_check_warnings))[0]

    async def compute_log_probs(self) -> list[np.ndarray]:
        """Compute log-probs of the loaded rows under the current weights."""
        return await self._call(lambda worker: worker.compute_log_probs())

    async def compute_ref_log_probs(self, batches: Sequence[RankBatch] | None = None) -> list[np.ndarray]:
        """Compute log-probs of the loaded rows, or of `batches`, under the reference."""
        if batches is None:
            return await self._call(lambda worker: worker.compute_ref_log_probs())
        return await self._call_each(lambda worker, batch: worker.compute_ref_log_probs(batch), batches)

    async def compute_teacher_log_probs(self) -> list[np.ndarray]:
        """Compute log-probs of the loaded rows under the teacher."""
        return await self._call(lambda worker: worker.compute_teacher_log_probs())

    async def update(
        self, columns: Sequence[Columns[np.ndarray]], steps: Sequence[list[MiniBatch]], skip_bad: bool = False
    ) -> dict[str, float]:
        """Run the optimizer steps of one iteration over the loaded rows. Returns metrics over all ranks.

        steps: mini-batches of each batch. skip_bad: skip steps with a non-finite gradient instead of raising
        FloatingPointError.
        """
        each = list(zip(columns, steps, strict=True))
        return (await self._call_each(lambda worker, item: worker.update(*item, skip_bad), each))[0]

    async def get_old_log_probs(self) -> list[np.ndarray]:
        """Return the log-probs of the loaded rows that the last update used as those of the sampling policy."""
        return await self._call(lambda worker: worker.get_old_log_probs())

    async def reset_reference_and_optimizer(self) -> None:
        """Copy the policy to the reference and reset the optimizer."""
        await self.ranks.call(lambda worker: worker.reset_reference_and_optimizer())

    async def send_weights(self, version: int) -> WeightUpdate:
        """Send the weights to the engines, as a collective of all ranks. Returns the update with its digest."""
        return merge_updates(await self.ranks.call(lambda worker: worker.send_weights(version)))

    async def release_weights(self) -> None:
        """Free the buffers of the last weight sync, after the engines have confirmed it, and offload the policy."""
        await self.ranks.call(lambda worker: worker.release_weights())

    async def probe(self, token_ids: list[int]) -> list[float]:
        """Compute the log-prob of each token after the first at temperature 1, then offload the policy."""
        return (await self.ranks.call(lambda worker: worker.compute_probe_log_probs(token_ids)))[0]


class CriticGroup(RLGroup["CriticWorker"]):
    """Handle to the critic."""

    name = "critic"

    async def compute_values(self) -> list[np.ndarray]:
        """Compute the values of the loaded rows' response tokens under the current weights."""
        return await self._call(lambda worker: worker.compute_values())

    async def update(self, columns: Sequence[Columns[np.ndarray]], skip_bad: bool = False) -> dict[str, float]:
        """Run the optimizer steps of one iteration, as PolicyGroup.update does."""
        return (await self._call_each(lambda worker, item: worker.update(item, skip_bad), columns))[0]


class RewardModelGroup(ModelGroup["RewardModelWorker"]):
    """Handle to the trained reward model. Its weights never change."""

    async def compute_scores(self, batches: Sequence[RankBatch]) -> list[np.ndarray]:
        """Compute the score of each row at its last token. Returns float32 [rows] per batch."""
        return await self._call_each(lambda worker, batch: worker.compute_scores(batch), batches)


class EngineGroup(WorkerGroup["RolloutWorker"]):
    """Handle to the rollout workers. All samples of a group run on one engine and share their prompt's prefill."""

    def __init__(self, ranks: Ranks[RolloutWorker], samples_in_flight: int):
        super().__init__(ranks)
        self.samples_in_flight = samples_in_flight  # maximum per engine; more samples would wait in the engine's queue
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
        """Run the requests and yield (index of the request, its group) in the order in which they end. If an engine
        dies, WorkerDied is raised after the requests on all other engines have ended."""

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
        """Pause every engine between two tokens. Requests continue after `resume`, with the weights of that time."""
        await self.ranks.call(lambda worker: worker.pause())

    async def resume(self) -> None:
        """Resume every engine."""
        await self.ranks.call(lambda worker: worker.resume())

    async def hold_weights(self) -> bool:
        """Return whether the engines have weights; fake engines do not."""
        return all(await self.ranks.call(lambda worker: worker.has_weights))

    async def log_probs(self, token_ids: list[int]) -> list[list[float]]:
        """Compute on each engine the log-prob of each token after the first."""
        return await self.ranks.call(lambda worker: worker.log_probs(token_ids))

    async def confirm_weights(self, version: int, folder: str = "") -> list[WeightReceipt]:
        """Wait until each engine has all weights of this version. Returns version and digest of each engine.

        folder: folder in shared memory from which the engines load the weights first; "": the weights were sent.
        """
        return await self.ranks.call(lambda worker: worker.confirm_weights(version, folder))

    async def sleep(self) -> None:
        """Free the engines' GPU memory for the trainers until the next weight sync. No effect on a CPU."""
        await self.ranks.call(lambda worker: worker.sleep())

    async def wake_weights(self) -> None:
        """Allocate memory for the next weights."""
        await self.ranks.call(lambda worker: worker.wake_weights())

    async def wake_cache(self) -> None:
        """Allocate the KV cache."""
        await self.ranks.call(lambda worker: worker.wake_cache())

    @asynccontextmanager
    async def cache_released(self) -> AsyncIterator[None]:
        """Context manager that frees the KV caches during a phase of the trainers. The engines keep their weights."""
        await self.ranks.call(lambda worker: worker.release_cache())
        yield
        await self.wake_cache()

    async def start_profile(self) -> None:
        """Start recording the episodes of every rollout worker."""
        await self.ranks.call(lambda _: start_spans())

    async def take_profile(self) -> list[Span]:
        """Stop recording and return the spans of all workers."""
        return flatten(await self.ranks.call(lambda _: take_spans()))

    async def close(self, cleanup: Sequence[str] = ()) -> None:
        """Shut down the engines, whose cores are separate processes, and then the workers.

        cleanup: folders that each worker removes on its node.
        """
        await self.ranks.call(lambda worker: worker.close())
        await self.ranks.call(lambda _: remove_paths(map(Path, cleanup)))
        await self.ranks.close()


def flatten(lists: Sequence[list[T]]) -> list[T]:
    """Concatenate the lists of all ranks."""
    return [item for items in lists for item in items]
