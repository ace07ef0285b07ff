"""A trained reward model on one training rank: frozen, forward only.

compute_scores is a collective: every rank calls it. `rest` ends the reward model's phase on the GPU.
"""

from __future__ import annotations

import numpy as np
import torch

from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import FrozenFsdp, Model
from alphaapollo.data.batch import RankBatch
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.load import load_reward_model
from alphaapollo.models.reward_model import RewardModel
from alphaapollo.models.sharding import reshard, shard
from alphaapollo.models.training.offload import parameter_offload
from alphaapollo.observability.memory import process_memory
from alphaapollo.workers.process_group import (
    RankPlacement,
    compute_column,
    free_cache,
    join,
    leave,
    torch_dtype,
)


class RewardModelWorker:
    """One rank of the reward model.

    Args:
        model: with the path of the reward model.
        fsdp: where its parameters are between phases, and in one.
    """

    def __init__(self, model: Model, fsdp: FrozenFsdp, placement: RankPlacement):
        self.groups = join(placement)
        self.device = torch.device(placement.device)
        self.padded = model.attention == "padded"
        dtype = torch_dtype(model)
        loaded = load_reward_model(model, chosen_attention(model), dtype, materialize=placement.rank == 0)
        layers = decoder_layers(loaded)
        self.model = RewardModel(loaded).requires_grad_(False)
        shard(self.model, layers, self.groups.shards, dtype, fsdp.offload_policy, exact=[self.model.score])
        self.parameters = parameter_offload(self.model, fsdp.param_offload)
        self.offload()

    def compute_scores(self, batch: RankBatch) -> np.ndarray:
        """The score of each row, at its last token. float32 [R]

        `batch`: its rows have a response of one token, the last (see trainer/step/trained_reward.py).
        """
        self.parameters.reload()
        rows, sequence = batch.rows, self.groups.sequence
        return compute_column(self.model, self.model, rows, batch.mini_batches, self.padded, self.device, sequence)

    def offload(self) -> None:
        """The end of its phase: its GPU memory, as far as it can be spared, is free for others."""
        reshard(self.model)
        self.parameters.offload()
        free_cache(self.device)

    def memory(self) -> dict[str, float]:
        return process_memory()

    def close(self) -> None:
        leave()
