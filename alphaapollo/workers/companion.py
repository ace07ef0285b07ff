"""Parts of a worker that optional features add: a reference model, the check of shared prompts, MFU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.kl import REVERSE
from alphaapollo.batching.batch import MiniBatch, RankBatch, Rows
from alphaapollo.batching.shared_prompts import SharedPrompts
from alphaapollo.config.schema import Actor, FrozenFsdp
from alphaapollo.data.images import find_placeholder_ids
from alphaapollo.models.attention import uses_alphaapollo_backend
from alphaapollo.models.checkpoint import CheckpointSnapshot, load_snapshot, take_snapshot
from alphaapollo.models.decoder import replace_placeholder_ids
from alphaapollo.models.flops import FlopsEstimator, find_peak_flops
from alphaapollo.models.lm_head import DivergenceTarget, TokenStats
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder, describe_stateful_layers, make_rows
from alphaapollo.models.policy import PolicyModel, load_policy
from alphaapollo.models.sharding import FsdpRoot, local_tensor, reshard
from alphaapollo.models.train_state import make_parameter_offloader
from alphaapollo.workers.model_worker import compute_token_outputs

if TYPE_CHECKING:
    from alphaapollo.workers.policy import PolicyWorker
    from alphaapollo.workers.policy_objective import ObjectiveInputs


REFERENCE = "reference"  # role, and folder of a reset reference in the policy's checkpoint


class Companion:
    """What an optional feature adds to the policy worker. All methods are collectives; by default they do nothing."""

    role = ""  # name for PolicyWorker.compute_log_probs

    def begin_update(self, batch: RankBatch) -> None:
        """Prepare for an update on the loaded batch."""

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        """Compute log-probs of the response tokens with the feature's model, then offload it. float32 [tokens]"""
        raise NotImplementedError

    def make_divergence_target(
        self, batch: RankBatch, row_indices: list[int], micro: MicroBatch, actor: Actor
    ) -> DivergenceTarget | None:
        """Return next-token distributions from which the policy's divergence is computed. One companion may do so."""

    def compute_loss(
        self, micro: MicroBatch, stats: TokenStats, inputs: ObjectiveInputs
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return a term of the micro-batch's loss, and metrics to sum."""

    def end_step(self, rows: Rows, mini_batch: MiniBatch) -> None:
        """Follow an optimizer step of the policy on a mini-batch."""

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics of the update, which begin with `actor/` unless they have another section."""
        return {}

    def snapshot(self, checkpoint_folder: str) -> list[CheckpointSnapshot]:
        return []

    def load(self, checkpoint_folder: str) -> None:
        """Load the state from the policy's checkpoint. The policy is already loaded."""

    def offload(self) -> None:
        """Free GPU memory: reshard models and offload the configured tensors."""


class FrozenModel(Companion):
    """Companion with weights of its own, which the optimizer does not train. In a checkpoint, they are in the folder
    `role`."""

    def __init__(self, model: PolicyModel, param_offload: bool):
        self.model, self.parameters = model, make_parameter_offloader(model, param_offload)
        self.offload()

    def snapshot(self, checkpoint_folder: str) -> list[CheckpointSnapshot]:
        self.parameters.reload()
        return [take_snapshot(f"{checkpoint_folder}/{self.role}", self.model, (), {})]

    def load(self, checkpoint_folder: str) -> None:
        if Path(checkpoint_folder, self.role).is_dir():
            self.parameters.reload()
            load_snapshot(f"{checkpoint_folder}/{self.role}", self.model, ())

    def offload(self) -> None:
        reshard(self.model)
        self.parameters.offload()


class ReferenceModel(Companion):
    """Reference of the KL penalty: the policy without its LoRA adapters."""

    role = REFERENCE

    def __init__(self, worker: PolicyWorker):
        self.worker = worker

    @contextmanager
    def use(self) -> Iterator[PolicyModel]:
        """Yield the reference with its weights on the device."""
        self.worker.state.reload()
        with self.worker.policy.disable_adapters():
            yield self.worker.policy

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        with self.use() as model:
            compute = model.make_logprobs_function(self.worker.temperature)
            return compute_token_outputs(model, compute, batch.rows, batch.mini_batches, self.worker.builder)

    def make_divergence_target(
        self, batch: RankBatch, row_indices: list[int], micro: MicroBatch, actor: Actor
    ) -> DivergenceTarget | None:
        if not actor.uses_full_kl:
            return None
        with self.use() as model:
            return DivergenceTarget(model.compute_lm_head_input(micro), REVERSE)


class FrozenReference(FrozenModel, ReferenceModel):
    """Reference with weights of its own: those of the policy at the start, or at the last reset."""

    def __init__(self, worker: PolicyWorker, fsdp: FrozenFsdp):
        ReferenceModel.__init__(self, worker)
        model = load_policy(worker.config, worker.mesh, worker.dtype, fsdp.offload_policy)
        FrozenModel.__init__(self, model, fsdp.param_offload)
        self.was_reset = False

    @contextmanager
    def use(self) -> Iterator[PolicyModel]:
        self.parameters.reload()
        yield self.model

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        column = super().compute_log_probs(batch)
        self.parameters.offload()
        return column

    @torch.no_grad()
    def copy_policy(self) -> None:
        """Copy the policy's weights into the reference."""
        self.worker.state.reload()
        self.parameters.reload()
        for frozen, trained in zip(self.model.parameters(), self.worker.policy.parameters(), strict=True):
            local_tensor(frozen).copy_(local_tensor(trained))
        self.was_reset = True

    def snapshot(self, checkpoint_folder: str) -> list[CheckpointSnapshot]:
        return super().snapshot(checkpoint_folder) if self.was_reset else []

    def load(self, checkpoint_folder: str) -> None:
        super().load(checkpoint_folder)
        self.was_reset = Path(checkpoint_folder, REFERENCE).is_dir()


class MfuMeter(Companion):
    """Model FLOP/s utilization of an update, on GPUs with known peak FLOP/s."""

    def __init__(self, worker: PolicyWorker):
        self.placement, self.peak = worker.placement, None
        self.estimator = FlopsEstimator.from_model(worker.policy.model)
        if self.placement.device == "cuda":
            self.peak = find_peak_flops(torch.cuda.get_device_name())

    def begin_update(self, batch: RankBatch) -> None:
        self.flops, self.started = 0.0, time.perf_counter()

    def end_step(self, rows: Rows, mini_batch: MiniBatch) -> None:
        if self.peak is not None and self.estimator is not None:
            segments = map(rows.get_segment_and_prefix_lengths, mini_batch.micro_batches)
            self.flops += sum(self.estimator.estimate_training_flops(*lengths) for lengths in segments)

    def pop_metrics(self) -> dict[str, float]:
        if not self.flops or self.peak is None:
            return {}
        seconds = time.perf_counter() - self.started
        return {"perf/mfu/actor": self.flops / self.placement.sequence_parallel_size / seconds / self.peak}


KEY = "actor_rollout_ref.actor.use_prefix_grouper"
FINETUNING_KEY = "data.use_prefix_grouper"
# Allowed rounding, relative to the standard deviation of the values.
LIMIT = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25}
NUM_ROWS = 2  # rows of a batch to compare; with more, both layouts may not fit into memory


class SharedPromptCheck(Companion):
    """Comparison of a model's results with and without shared prompts, in the constructor and on the first batch.

    Args:
        compute_outputs: forward pass that returns one number per response token of a micro-batch.
        key: config key that enables shared prompts.
    """

    def __init__(
        self,
        root: FsdpRoot,
        compute_outputs: Callable[[MicroBatch], Tensor],
        builder: MicroBatchBuilder,
        dtype: torch.dtype,
        key: str = KEY,
    ):
        model: Any = root.model
        self.root, self.name, self.builder, self.key = root, type(model).__name__, builder, key
        self.compute_outputs, self.limit = compute_outputs, LIMIT[dtype]
        self.mismatch: float | None = None  # mean |difference| on the first batch, in standard deviations
        self._unreported: dict[str, float] = {}
        self.unsupported_reason: str | None = None  # why the model cannot use shared prompts
        if stateful := describe_stateful_layers(model.config):
            self.unsupported_reason = f"{self.name} {stateful}"
        elif not uses_alphaapollo_backend(model):
            self.unsupported_reason = f"{self.name} has its own attention code"
        else:
            excluded = getattr(root, "excluded_ids", find_placeholder_ids(model.config))
            examples = _make_example_rows(model.config.get_text_config().vocab_size, excluded)
            mismatch = self._measure_mismatch(examples, [0, 1])
            if not mismatch <= self.limit:
                self.unsupported_reason = self._describe_mismatch(mismatch)

    def begin_update(self, batch: RankBatch) -> None:
        """Raise ValueError if sharing changes the results too much, in the first batch that shares prompts."""
        if self.mismatch is None and batch.rows.shared_prompts is not None:
            self.mismatch = self._measure_mismatch(batch.rows, batch.mini_batches[0].micro_batches[0][:NUM_ROWS])
            self._unreported = {"sharing_gap": self.mismatch}
            if not self.mismatch <= self.limit:
                raise ValueError(
                    f"{self.key}=true is not supported: {self._describe_mismatch(self.mismatch)}. Set {self.key}=false."
                )

    def pop_metrics(self) -> dict[str, float]:
        """Return the metric `sharing_gap`: the mismatch measured on the first batch. Later calls return {}."""
        metrics, self._unreported = self._unreported, {}
        return metrics

    def _describe_mismatch(self, mismatch: float) -> str:
        return (
            f"with {self.name}, the results of rows that share a prompt differ from those of separate rows by "
            f"{mismatch:.2g} standard deviations, but rounding explains at most {self.limit:g}"
        )

    @torch.no_grad()
    def _measure_mismatch(self, rows: Rows, row_indices: Sequence[int]) -> float:
        """Compute mean(|shared - plain|) / std(plain) of results with (shared) and without (plain) shared prompts."""
        shared, plain = (
            self.compute_outputs(self.builder.build(layout, row_indices)).float()
            for layout in (rows, replace(rows, shared_prompts=None))
        )
        reshard(self.root)
        deviation = plain.std(correction=0).clamp(min=1e-6)  # small for a model near its random initialization
        return float((shared - plain).abs().mean() / deviation)


def _make_example_rows(vocabulary_size: int, placeholder_ids: Sequence[int]) -> Rows:
    """Make two token sequences, with prompts of six and five tokens that share the first five tokens.
    `placeholder_ids`: tokens that cannot be text."""
    prompt = np.arange(5) * 37 + 11
    texts = [np.append(prompt, [3, 1, 4, 1]) % vocabulary_size, np.append(prompt, [5, 9, 2]) % vocabulary_size]
    texts = [replace_placeholder_ids(text, placeholder_ids) for text in texts]
    return make_rows(texts, [6, 5], SharedPrompts(np.zeros(2, dtype=np.int64), np.full(2, 5)))
