"""Plug-ins of the policy worker: what optional features (a reference model, teachers, TRPO) add to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from alphaapollo.batching.batch import RankBatch
from alphaapollo.models.checkpoint import CheckpointSnapshot, load_snapshot, take_snapshot
from alphaapollo.models.lm_head import DivergenceTarget, TokenStats
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.sharding import reshard
from alphaapollo.models.train_state import make_parameter_offloader
from alphaapollo.workers.policy_objective import ObjectiveInputs

REFERENCE = "reference"  # role, and folder of a reset reference in the policy's checkpoint


class PolicyPlugin:
    """What an optional feature adds to the policy worker. All methods are collectives; by default they do nothing."""

    role = ""  # name for PolicyWorker.compute_log_probs

    def begin_update(self, batch: RankBatch) -> None:
        """Prepare for training on a batch."""

    def compute_log_probs(self, batch: RankBatch) -> np.ndarray:
        """Compute log-probs of the response tokens with the feature's model, then offload it. float32 [tokens]"""
        raise NotImplementedError

    def make_divergence_target(
        self, batch: RankBatch, row_indices: list[int], micro: MicroBatch
    ) -> DivergenceTarget | None:
        """Return next-token distributions to compute the policy's divergence from. Only one plug-in may return them."""

    def compute_loss(
        self, micro: MicroBatch, stats: TokenStats, inputs: ObjectiveInputs
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return a term of the micro-batch's loss, and metrics to sum."""

    def end_step(self) -> None:
        """Update the plug-in after an optimizer step of the policy."""

    def get_metrics(self) -> dict[str, float]:
        """Return metrics of the steps since begin_update. Names without a section are logged with `actor/`."""
        return {}

    def snapshot(self, checkpoint_folder: str) -> list[CheckpointSnapshot]:
        return []

    def load(self, checkpoint_folder: str) -> None:
        """Load the state from the policy's checkpoint. The policy is already loaded."""

    def offload(self) -> None:
        """Free GPU memory: reshard models and offload the configured tensors."""


class FrozenModel(PolicyPlugin):
    """Plug-in with weights of its own, which the optimizer does not train. A checkpoint has these weights in
    the folder `role`."""

    def __init__(self, model: PolicyModel, param_offload: bool):
        self.model, self.offloader = model, make_parameter_offloader(model, param_offload)
        self.offload()

    def snapshot(self, checkpoint_folder: str) -> list[CheckpointSnapshot]:
        self.offloader.reload()
        return [take_snapshot(f"{checkpoint_folder}/{self.role}", self.model, (), {})]

    def load(self, checkpoint_folder: str) -> None:
        if Path(checkpoint_folder, self.role).is_dir():
            self.offloader.reload()
            load_snapshot(f"{checkpoint_folder}/{self.role}", self.model, ())

    def offload(self) -> None:
        reshard(self.model)
        self.offloader.offload()
