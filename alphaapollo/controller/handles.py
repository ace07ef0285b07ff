"""Typed handles to worker groups: the controller calls a method of a handle, and the handle calls the workers.

The workers are Ray actors, forked processes, or objects in this process (ranks.py). Only the weight transfer on GPUs
has its own remote calls (ray_launcher.py, process_ranks.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from alphaapollo.algorithms.mismatch import MismatchSums
from alphaapollo.batching.batch import Columns, FinetuningStepResult, MiniBatch, RankBatch
from alphaapollo.config.schema import LoraForm
from alphaapollo.controller.ranks import Ranks, Result, await_if_awaitable
from alphaapollo.engines.weight_sync.digest import format_digest
from alphaapollo.engines.weight_sync.transport import WeightUpdate
from alphaapollo.engines.weight_sync.verification import Probe, merge_weight_updates
from alphaapollo.observability.timing import start_profile, take_profile
from alphaapollo.utils.heartbeat import Span

if TYPE_CHECKING:
    from alphaapollo.models.train_state import AdamSettings
    from alphaapollo.rollout.worker import RolloutWorker
    from alphaapollo.workers.adapter_slots import AdapterForm
    from alphaapollo.workers.critic import CriticWorker, RewardModelWorker
    from alphaapollo.workers.finetuning_worker import FinetuningWorker  # noqa: F401  (used in a string)
    from alphaapollo.workers.model_worker import TrainingWorker
    from alphaapollo.workers.policy import PolicyWorker

T = TypeVar("T")
W = TypeVar("W", bound="TrainingWorker | RewardModelWorker | RolloutWorker")  # any worker
M = TypeVar("M", bound="TrainingWorker | RewardModelWorker")  # worker with a model
L = TypeVar("L", bound="TrainingWorker")  # worker that trains (learns)
R = TypeVar("R", bound="PolicyWorker | CriticWorker")  # worker that trains on rollouts
B = TypeVar("B", bound=RankBatch)


class WorkerGroup(Generic[W]):
    """Handle to the workers of one role, e.g. all policy workers."""

    def __init__(self, ranks: Ranks[W]):
        self.ranks = ranks
        self.memory_metrics: dict[str, float] = {}  # GiB, maximum over all ranks, after the last weight sync or offload

    async def start_profile(self) -> None:
        """Start recording torch operations or episodes on every rank."""
        await self.ranks.call_with_items(lambda _, track: start_profile(track), self._list_tracks())

    async def stop_profile(self) -> list[Span]:
        """Stop recording and return what all ranks have recorded."""
        spans = await self.ranks.call_with_items(lambda _, track: take_profile(track), self._list_tracks())
        return list(chain.from_iterable(spans))

    def _list_tracks(self) -> list[str]:
        return [f"{self.ranks.role} {rank}" for rank in range(self.ranks.size)]

    def _set_memory_metrics(self, results: Sequence[tuple[object, dict[str, float]]]) -> None:
        self.memory_metrics = {name: max(metrics[name] for _, metrics in results) for name in results[0][1]}


class ModelWorkerGroup(WorkerGroup[M]):
    """Handle to a model on the training ranks. `sequence_parallel` consecutive ranks split each sequence between them,
    so they receive the same batch. The methods take and return one item per batch, not one per rank."""

    def __init__(self, ranks: Ranks[M], sequence_parallel: int = 1):
        super().__init__(ranks)
        self.sequence_parallel = sequence_parallel

    async def offload(self) -> None:
        """Free the model's GPU memory after use: move to host memory the tensors that fsdp_config offloads."""
        self._set_memory_metrics(await self.ranks.call(lambda worker: (worker.offload(), worker.get_memory_metrics())))

    async def _call_with_batches(self, function: Callable[[M, T], Result], batches: Sequence[T]) -> list[Result]:
        """Call function(worker, batch) on all ranks. Consecutive sequence-parallel ranks get the same batch."""
        batches_of_ranks = [batch for batch in batches for _ in range(self.sequence_parallel)]
        return (await self.ranks.call_with_items(function, batches_of_ranks))[:: self.sequence_parallel]

    async def _call_all_ranks(self, function: Callable[[M], Result]) -> list[Result]:
        """Call function(worker) on all ranks. Returns the result of the first rank of each sequence-parallel group."""
        return (await self.ranks.call(function))[:: self.sequence_parallel]


class TrainingWorkerGroup(ModelWorkerGroup[L]):
    """Handle to a model that is trained."""

    async def get_logprob_check_warnings(self) -> Sequence[str]:
        """Return the warnings of the check that compares the model's log-probs with a reference at the start."""
        return (await self.ranks.call(lambda worker: worker.logprob_check_warnings))[0]

    async def save(self, checkpoint_folder: str) -> None:
        """Start writing a checkpoint of the current weights, optimizer and schedule. Each rank writes its shard."""
        await self.ranks.call(lambda worker: worker.save(checkpoint_folder))

    async def wait_for_save(self) -> float:
        """Wait until all ranks have written the last checkpoint. Returns the writing time of the slowest rank in s."""
        return float(max(await self.ranks.call(lambda worker: wait_for_save(worker))))

    async def load(self, checkpoint_folder: str) -> None:
        """Load weights, optimizer and schedule from a checkpoint, which any number of ranks may have written."""
        await self.ranks.call(lambda worker: worker.load(checkpoint_folder))

    async def begin_record(self, folder: str, sample_tokens: int) -> None:
        """Write the gradients of the following optimizer steps to a folder (models/update_record.py)."""
        await self.ranks.call(lambda worker: worker.begin_record(folder, sample_tokens))

    async def end_record(self) -> None:
        """Write the weights to the folder of `begin_record`, and stop recording."""
        await self.ranks.call(lambda worker: worker.end_record())

    async def export(self, output_folder: str, lora_form: LoraForm) -> None:
        """Export the model in Hugging Face format. A LoRA model is merged, or exported as a peft adapter."""
        await self.ranks.call(lambda worker: worker.export(output_folder, lora_form))

    async def compute_state_fingerprints(self) -> dict[str, tuple[str, float]]:
        """Return name -> (digest, norm) for the trained weights and for each optimizer moment, e.g. exp_avg."""
        by_rank = await self.ranks.call(lambda worker: worker.compute_state_fingerprints())
        parts = {name: list(zip(*(rank_parts[name] for rank_parts in by_rank), strict=True)) for name in by_rank[0]}
        return {name: (format_digest(sum(digests)), sum(squares) ** 0.5) for name, (digests, squares) in parts.items()}


async def wait_for_save(worker: TrainingWorker) -> float:
    """Wait until the worker's last checkpoint is written. Returns the writing time in seconds."""
    return await asyncio.wrap_future(worker.get_save_future())


class FinetuningGroup(TrainingWorkerGroup["FinetuningWorker[B]"], Generic[B]):
    """Handle to the model of a fine-tuning run (SFT, preferences, reward model)."""

    async def step(self, batches: Sequence[B], skip_bad_step: bool) -> FinetuningStepResult:
        """Run one optimizer step over all ranks and return its metrics.

        skip_bad_step: skip a step with a non-finite gradient instead of raising FloatingPointError."""
        return (await self._call_with_batches(lambda worker, batch: worker.step(batch, skip_bad_step), batches))[0]

    async def evaluate(self, batches: Sequence[B]) -> dict[str, float]:
        """Return the sums of metrics and of loss denominators over held-out batches. Does not update the weights."""
        return (await self._call_with_batches(lambda worker, batch: worker.evaluate(batch), batches))[0]


class RLWorkerGroup(TrainingWorkerGroup[R]):
    """Handle to a model that is trained on rollouts: `load_batch` sets the token sequences of an iteration, and the
    other methods use them. Per-token results are flat float32 arrays [sum of response lengths], one per batch."""

    _unsent_batches: Sequence[RankBatch] = ()

    async def get_shared_prompts_obstacle(self) -> str | None:
        """Return why this model cannot compute a prompt once for all responses of its group, or None if it can."""
        return (await self.ranks.call(lambda worker: worker.shared_prompts.unsupported_reason))[0]

    def load_batch(self, batches: Sequence[RankBatch]) -> None:
        """Set the token sequences of this iteration, one batch per data-parallel rank. They are sent with the first
        call that uses them, because each call takes time for every rank."""
        self._unsent_batches = batches

    async def _call_with_batches(self, function: Callable[[R, T], Result], batches: Sequence[T]) -> list[Result]:
        unsent, self._unsent_batches = self._unsent_batches, ()
        if not unsent:
            return await super()._call_with_batches(function, batches)

        def load_and_call(worker: R, pair: tuple[RankBatch, T]) -> Result:
            worker.load_batch(pair[0])
            return function(worker, pair[1])

        load_and_call.__qualname__ = function.__qualname__  # the name of the call
        return await super()._call_with_batches(load_and_call, list(zip(unsent, batches, strict=True)))

    async def _call_all_ranks(self, function: Callable[[R], Result]) -> list[Result]:
        if not self._unsent_batches:
            return await super()._call_all_ranks(function)
        call: Callable[[R, None], Result] = lambda worker, _: function(worker)  # noqa: E731
        call.__qualname__ = function.__qualname__
        return await self._call_with_batches(call, [None] * len(self._unsent_batches))


async def update_policy(
    worker: PolicyWorker, inputs: tuple[Any, ...], options: tuple[Any, ...], measures_mismatch: bool
) -> tuple[dict[str, float], MismatchSums | None, np.ndarray | None]:
    """Update the policy, and return its log-probs and their mismatch in the same call, because each call takes time for
    every rank."""
    metrics = await await_if_awaitable(worker.update(*inputs, *options))
    if not measures_mismatch:
        return metrics, None, None
    return metrics, worker.sum_logprob_mismatch(), worker.get_old_log_probs()


class PolicyGroup(RLWorkerGroup["PolicyWorker"]):
    """Handle to the policy and to the other models on its ranks, e.g. the reference."""

    async def compute_log_probs(self, role: str = "policy") -> list[np.ndarray]:
        """Compute log-probs of the response tokens in the loaded batches with the policy or another model on its ranks,
        e.g. the "reference"."""
        return await self._call_all_ranks(lambda worker: worker.compute_log_probs(role))

    async def compute_surprises(self) -> list[np.ndarray]:
        """Compute log-prob, entropy and variance of the log-probs of the response tokens in the loaded batches."""
        return await self._call_all_ranks(lambda worker: worker.compute_surprises())

    async def update(
        self,
        columns: Sequence[Columns[np.ndarray]],
        mini_batches: Sequence[list[MiniBatch]],
        skip_bad_step: bool = False,
        measures_entropy: bool = True,
        measures_mismatch: bool = False,
        kl_coef: float | None = None,
    ) -> tuple[dict[str, float], list[MismatchSums], list[np.ndarray]]:
        """Run the optimizer steps of one iteration. Returns metrics over all ranks and, if the mismatch is measured,
        its sums and the old log-probs of each batch.

        columns: advantages, old log-probs etc. of the loaded batches. mini_batches: one list per batch.
        skip_bad_step: skip steps with a non-finite gradient instead of raising FloatingPointError.
        measures_entropy: compute the entropy even if the loss does not need it.
        measures_mismatch: compare the old log-probs with those of the engine, for the tokens trained on.
        kl_coef: coefficient of ppo_kl; None: the configured coefficient."""
        inputs, options = list(zip(columns, mini_batches, strict=True)), (skip_bad_step, measures_entropy, kl_coef)
        results = await self._call_with_batches(
            lambda worker, pair: update_policy(worker, pair, options, measures_mismatch), inputs
        )
        mismatch_sums = [sums for _, sums, _ in results if sums is not None]
        return results[0][0], mismatch_sums, [old for _, _, old in results if old is not None]

    async def accumulate(
        self,
        batches: Sequence[RankBatch],
        columns: Sequence[Columns[np.ndarray]],
        loss: str | bytes,
        denominator: float | None,
        kl_coef: float | None,
    ) -> tuple[dict[str, float], list[np.ndarray]]:
        """Add the gradients of rows to those of earlier calls (PolicyLearner.accumulate). Returns the loss and metrics
        over all ranks, and the log-probs of each batch."""
        results = await self._call_with_batches(
            lambda worker, pair: worker.accumulate(*pair, loss, denominator, kl_coef),
            list(zip(batches, columns, strict=True)),
        )
        return results[0][0], [logprobs for _, logprobs in results]

    async def take_step(self, lr: float | None, grad_clip: float | None, adam: AdamSettings) -> dict[str, float]:
        """Take an optimizer step with the accumulated gradients, and return its metrics. lr, grad_clip: None for the
        configured value."""
        return (await self.ranks.call(lambda worker: worker.take_step(lr, grad_clip, adam)))[0]

    async def add_adapter(self, name: str, form: AdapterForm) -> None:
        """Add a LoRA adapter, or replace the adapter of this name (workers/adapter_slots.py)."""
        await self.ranks.call(lambda worker: worker.adapters.add(name, form))

    async def list_adapted_layers(self) -> list[str]:
        """Return the paths of the layers that get adapters."""
        return list((await self.ranks.call(lambda worker: worker.adapters.list_layers()))[0])

    async def remove_adapter(self, name: str) -> None:
        await self.ranks.call(lambda worker: worker.adapters.remove(name))

    async def use_adapter(self, name: str) -> None:
        """Put a LoRA adapter into the model. All other methods use it."""
        await self.ranks.call(lambda worker: worker.adapters.switch(name))

    async def write_adapter(self, folder: str) -> str:
        """Write the current adapter in peft's format, with the dtype of the engines, and return its digest."""
        return (await self.ranks.call(lambda worker: worker.write_adapter(folder)))[0]

    async def reset_optimizer(self) -> None:
        """Drop the optimizer's state and the number of steps."""
        await self.ranks.call(lambda worker: worker.state.reset_optimizer(resets_schedule=True))

    async def clear_gradients(self) -> None:
        await self.ranks.call(lambda worker: worker.clear_gradients())

    async def get_old_log_probs(self) -> list[np.ndarray]:
        """Return the old log-probs (the denominator of PPO's ratio) that the last update used."""
        return await self._call_all_ranks(lambda worker: worker.get_old_log_probs())

    async def reset_reference_and_optimizer(self) -> None:
        """Copy the policy's weights to the reference model and reset the optimizer state."""
        await self.ranks.call(lambda worker: worker.reset_reference_and_optimizer())

    async def send_weights(self, version: int) -> WeightUpdate:
        """Send the policy's weights to the engines; all ranks take part. Returns the weights' version and digest."""
        return merge_weight_updates(await self.ranks.call(lambda worker: worker.send_weights(version)))

    async def release_sent_weights(self) -> None:
        """Free the transfer buffers after the engines have confirmed the weights, and offload the policy."""
        release: Callable[[PolicyWorker], object] = lambda worker: worker.release_sent_weights()  # noqa: E731
        results = await self.ranks.call(lambda worker: (release(worker), worker.get_memory_metrics()))
        self._set_memory_metrics(results)

    async def compute_probe_log_probs(self, probe: Probe) -> list[float]:
        """Return the policy's log-probs of the probe, to compare with the engines', and offload the policy."""
        return (await self.ranks.call(lambda worker: worker.compute_probe_log_probs(probe.token_ids, probe.images)))[0]


class CriticGroup(RLWorkerGroup["CriticWorker"]):
    """Handle to the critic."""

    async def compute_values(self) -> list[np.ndarray]:
        """Compute the critic's values of the response tokens in the loaded batches."""
        return await self._call_all_ranks(lambda worker: worker.compute_values())

    async def update(self, columns: Sequence[Columns[np.ndarray]], skip_bad_step: bool = False) -> dict[str, float]:
        """Run the critic's optimizer steps of one iteration and return their metrics over all ranks."""
        return (await self._call_with_batches(lambda worker, batch: worker.update(batch, skip_bad_step), columns))[0]


class RewardModelGroup(ModelWorkerGroup["RewardModelWorker"]):
    """Handle to a reward model that scores responses. Its weights are frozen."""

    async def compute_scores(self, batches: Sequence[RankBatch]) -> list[np.ndarray]:
        """Score each token sequence at its last token. Returns float32 [number of sequences] per batch."""
        return await self._call_with_batches(lambda worker, batch: worker.compute_scores(batch), batches)
