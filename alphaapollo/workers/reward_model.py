"""Reward model worker, one per rank of a frozen reward model."""

from __future__ import annotations

import numpy as np
import torch

from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import FrozenFsdp, Model
from alphaapollo.data.batch import RankBatch
from alphaapollo.models.load import load_reward_model
from alphaapollo.models.scalar_models import ScoreModel
from alphaapollo.models.sharding import reshard, shard_model
from alphaapollo.models.training.offload import make_parameter_offloader
from alphaapollo.workers.model_worker import ModelWorker, compute_token_outputs
from alphaapollo.workers.process_group import RankPlacement


class RewardModelWorker(ModelWorker):
    """Worker that computes scores with one rank of a frozen reward model."""

    def __init__(self, model: Model, fsdp: FrozenFsdp, placement: RankPlacement):
        super().__init__(model, placement)
        attention = get_attention_kernel(model)
        root = ScoreModel(load_reward_model(model, attention, self.dtype)).requires_grad_(False)
        self.model = shard_model(
            root, lambda: ScoreModel(load_reward_model(model, attention)), self.mesh, self.dtype, fsdp.offload_policy
        )
        self.parameters = make_parameter_offloader(self.model, fsdp.param_offload)
        self.offload()

    def compute_scores(self, batch: RankBatch) -> np.ndarray:
        """Compute the score of each of R token sequences, whose response must be the last token. float32 [R]"""
        self.parameters.reload()
        return compute_token_outputs(self.model, self.model, batch.rows, batch.mini_batches, self.builder)

    def offload(self) -> None:
        """Free GPU memory for other workers: reshard the model and offload the configured tensors."""
        reshard(self.model)
        self.parameters.offload()
        torch.cuda.empty_cache()
