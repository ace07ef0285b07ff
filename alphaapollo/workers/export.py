"""A checkpoint back into a model that transformers and vLLM load, in one process on the CPU."""

from __future__ import annotations

import torch

from alphaapollo.config.schema import LoraForm, Model
from alphaapollo.models import checkpoint
from alphaapollo.models.export import export
from alphaapollo.models.lora import load_trained, load_trained_scorer
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.reward_model import RewardModel
from alphaapollo.models.sharding import shard
from alphaapollo.models.trunk import decoder_layers
from alphaapollo.workers.base import ALONE, RankPlacement, join, leave


def export_checkpoint(
    folder: str, model: Model, dtype: torch.dtype, output: str, form: LoraForm, scores: bool = False
) -> None:
    """Write the weights in `folder`, saved by a policy's or a fine-tuning's worker on any number of ranks, to `output`;
    form: as of models.export; scores: they are a reward model's.

    Raises:
        ValueError: the model cannot be loaded, or the checkpoint is not of such a model.
        OSError: the output cannot be written.
    """
    groups = join(RankPlacement(0, 1, ALONE, "cpu", torch.get_num_threads()))
    try:
        load = load_trained_scorer if scores else load_trained
        loaded = load(model, "padded", torch.float32, materialise=True, seed=0)
        layers = decoder_layers(loaded)
        trained = RewardModel(loaded) if scores else PolicyModel(loaded)
        shard(trained, layers, groups.shards, torch.float32, False)
        checkpoint.load(folder, trained, optimizer=None)
        export(output, loaded, model, dtype, form)
    finally:
        leave()
