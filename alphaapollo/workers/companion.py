"""Parts of a policy worker that optional features add, e.g. a reference model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.divergence import REVERSE
from alphaapollo.batching.batch import MiniBatch, RankBatch, Rows
from alphaapollo.config.schema import Actor
from alphaapollo.models.checkpoint import CheckpointSnapshot, load_snapshot, take_snapshot
from alphaapollo.models.flops import FlopsEstimator, find_peak_flops
from alphaapollo.models.lm_head import DivergenceTarget, TokenStats
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.sharding import local_tensor, reshard
from alphaapollo.models.train_state import TrainState, make_parameter_offloader
from alphaapollo.workers.model_worker import compute_token_outputs
from alphaapollo.workers.process_group import RankPlacement

if TYPE_CHECKING:
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


class ReferenceModel(Companion):
    """Reference of the KL penalty: the policy without its LoRA adapters. `state`: training state of the policy."""

    role = REFERENCE

    def __init__(self, policy: PolicyModel, state: TrainState, builder: MicroBatchBuilder, temperature: float):
        self.policy, self.state, self.builder, self.temperature = policy, state, builder, temperature

    @contextmanager
    def use(self) -> Iterator[PolicyModel]:
        """Yield the reference with its weights on the device."""
        self.state.reload()
        with self.policy.disable_adapters():
            yield self.policy

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        with self.use() as model:
            compute = model.make_logprobs_function(self.temperature)
            return compute_token_outputs(model, compute, batch.rows, batch.mini_batches, self.builder)

    def make_divergence_target(
        self, batch: RankBatch, row_indices: list[int], micro: MicroBatch, actor: Actor
    ) -> DivergenceTarget | None:
        if not actor.uses_full_kl:
            return None
        with self.use() as model:
            return DivergenceTarget(model.compute_lm_head_input(micro), REVERSE)


class FrozenReference(ReferenceModel):
    """Reference with weights of its own: those of the policy at the start, or at the last reset."""

    def __init__(
        self,
        model: PolicyModel,
        policy: PolicyModel,
        state: TrainState,
        builder: MicroBatchBuilder,
        temperature: float,
        param_offload: bool,
    ):
        super().__init__(policy, state, builder, temperature)
        self.model, self.was_reset = model, False
        self.parameters = make_parameter_offloader(model, param_offload)

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
        self.state.reload()
        self.parameters.reload()
        for frozen, trained in zip(self.model.parameters(), self.policy.parameters(), strict=True):
            local_tensor(frozen).copy_(local_tensor(trained))
        self.was_reset = True

    def snapshot(self, checkpoint_folder: str) -> list[CheckpointSnapshot]:
        if not self.was_reset:
            return []
        self.parameters.reload()
        return [take_snapshot(f"{checkpoint_folder}/{REFERENCE}", self.model, (), {})]

    def load(self, checkpoint_folder: str) -> None:
        self.was_reset = Path(checkpoint_folder, REFERENCE).is_dir()
        if self.was_reset:
            self.parameters.reload()
            load_snapshot(f"{checkpoint_folder}/{REFERENCE}", self.model, ())

    def offload(self) -> None:
        reshard(self.model)
        self.parameters.offload()


class MfuMeter(Companion):
    """Model FLOP/s utilization of an update, on GPUs with known peak FLOP/s."""

    def __init__(self, policy: PolicyModel, placement: RankPlacement):
        self.placement, self.estimator, self.peak = placement, FlopsEstimator.from_model(policy.model), None
        if placement.device == "cuda":
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
