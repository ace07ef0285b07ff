"""A checkpoint back into a model that transformers and vLLM load, in one process on the CPU."""

from __future__ import annotations

import torch

from alphaapollo.config.schema import LoraForm, Model
from alphaapollo.models import checkpoint
from alphaapollo.models.export import export
from alphaapollo.models.lora import load_trained
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.sharding import shard
from alphaapollo.models.trunk import decoder_layers
from alphaapollo.workers.base import ALONE, RankPlacement, join, leave


def export_checkpoint(folder: str, model: Model, dtype: torch.dtype, output: str, form: LoraForm) -> None:
    """Write the weights in `folder`, saved by a policy or SFT worker on any number of ranks, to `output`; form: as of
    models.export.

    Raises:
        ValueError: the model cannot be loaded, or the checkpoint is not of such a model.
        OSError: the output cannot be written.
    """
    groups = join(RankPlacement(0, 1, ALONE, "cpu", torch.get_num_threads()))
    try:
        loaded = load_trained(model, "padded", torch.float32, materialise=True, seed=0)
        policy = PolicyModel(loaded)
        shard(policy, decoder_layers(loaded), groups.shards, torch.float32, False, PolicyModel.forward_methods)
        checkpoint.load(folder, policy, optimizer=None)
        export(output, policy.model, model, dtype, form)
    finally:
        leave()
