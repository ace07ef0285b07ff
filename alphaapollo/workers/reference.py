"""Reference model of the KL penalty, on the policy's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from alphaapollo.algorithms.kl import REVERSE
from alphaapollo.batching.batch import RankBatch
from alphaapollo.config.schema import FrozenFsdp
from alphaapollo.models.checkpoint import CheckpointSnapshot
from alphaapollo.models.lm_head import DivergenceTarget
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.policy import PolicyModel, load_policy
from alphaapollo.models.sharding import local_tensor
from alphaapollo.workers.model_worker import compute_token_outputs
from alphaapollo.workers.policy_learner import PolicyLearner
from alphaapollo.workers.policy_plugins import REFERENCE, FrozenModel, PolicyPlugin


class ReferenceModel(PolicyPlugin):
    """Reference of the KL penalty: the policy without its LoRA adapters."""

    role = REFERENCE

    def __init__(self, worker: PolicyLearner):
        self.worker = worker

    @contextmanager
    def reloaded_model(self) -> Iterator[PolicyModel]:
        """Context manager: reload the weights, and yield the reference. The weights stay on the device."""
        self.worker.state.reload()
        with self.worker.policy.disable_adapters():
            yield self.worker.policy

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        with self.reloaded_model() as model:
            compute = model.make_logprobs_function(self.worker.temperature)
            return compute_token_outputs(model, compute, batch.rows, batch.mini_batches, self.worker.builder)

    def make_divergence_target(
        self, batch: RankBatch, row_indices: list[int], micro: MicroBatch
    ) -> DivergenceTarget | None:
        if not self.worker.actor.uses_full_kl:
            return None
        with self.reloaded_model() as model:
            return DivergenceTarget(model.compute_lm_head_input(micro), REVERSE)


class FrozenReference(FrozenModel, ReferenceModel):
    """Reference with weights of its own: those of the policy at the start, or at the last reset."""

    def __init__(self, worker: PolicyLearner, fsdp: FrozenFsdp):
        ReferenceModel.__init__(self, worker)
        model = load_policy(worker.config, worker.mesh, worker.dtype, fsdp.offload_policy)
        FrozenModel.__init__(self, model, fsdp.param_offload)
        self.was_reset = False

    @contextmanager
    def reloaded_model(self) -> Iterator[PolicyModel]:
        self.offloader.reload()
        yield self.model

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        column = super().compute_log_probs(batch)
        self.offload()
        return column

    @torch.no_grad()
    def copy_policy(self) -> None:
        """Copy the policy's weights into the reference."""
        self.worker.state.reload()
        self.offloader.reload()
        for frozen, trained in zip(self.model.parameters(), self.worker.policy.parameters(), strict=True):
            local_tensor(frozen).copy_(local_tensor(trained))
        self.was_reset = True

    def snapshot(self, checkpoint_folder: str) -> list[CheckpointSnapshot]:
        return super().snapshot(checkpoint_folder) if self.was_reset else []

    def load(self, checkpoint_folder: str) -> None:
        super().load(checkpoint_folder)
        self.was_reset = Path(checkpoint_folder, REFERENCE).is_dir()
