"""Export a checkpoint as a Hugging Face model folder, in one process on the CPU, and verify the folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from alphaapollo.config.schema import LoraForm, Model
from alphaapollo.models.checkpoint import load_snapshot
from alphaapollo.models.export import (
    ModelKind,
    check_exported_outputs,
    compute_transformers_outputs,
    export_critic,
    export_model,
    make_probe_tokens,
)
from alphaapollo.models.lora import load_trainable_lm, load_trainable_reward_model
from alphaapollo.models.micro_batch import MicroBatchBuilder, make_rows
from alphaapollo.models.policy import PolicyModel, ScoreModel, ValueModel
from alphaapollo.models.sharding import shard_model
from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement, initialize_rank, shut_down_rank

WRAPPERS: dict[ModelKind, Callable[..., ScoreModel | ValueModel | PolicyModel]] = {
    "policy": PolicyModel,
    "reward model": ScoreModel,
    "critic": partial(ValueModel, seed=0),
}


def export_checkpoint(
    checkpoint_folder: str, model: Model, dtype: torch.dtype, output_folder: str, form: LoraForm, kind: ModelKind
) -> float:
    """Export the weights in a worker's checkpoint folder as a Hugging Face model folder, and verify the folder.

    Any number of ranks may have saved the checkpoint. A critic becomes a token classifier with one label, and a
    fine-tuned language model has the kind "policy".

    Returns the mean absolute difference between the checkpoint's outputs on a few tokens and the outputs that
    transformers computes with the exported folder (models/export.py).

    Raises:
        ValueError: the model cannot be loaded, the checkpoint belongs to another model, or the outputs differ too much.
        OSError: the output cannot be written.
    """
    mesh, *_ = initialize_rank(RankPlacement(0, 1, NO_RENDEZVOUS, "cpu", torch.get_num_threads()))
    try:
        with torch.no_grad():
            load = load_trainable_reward_model if kind == "reward model" else load_trainable_lm
            loaded, wrap = load(model, "padded", torch.float32, seed=0), WRAPPERS[kind]  # on the meta device
            root, load_weights = wrap(loaded), partial(load, model, "padded", None, seed=0)
            shard_model(root, lambda: wrap(load_weights()), mesh, torch.float32, offload_policy=False)
            load_snapshot(checkpoint_folder, root, optimizers=())
            if isinstance(root, ValueModel):
                export_critic(output_folder, root, model, dtype)
            else:
                export_model(output_folder, loaded, model, dtype, form)
            tokens = make_probe_tokens(loaded.config)
            builder = MicroBatchBuilder(padded=True, device=torch.device("cpu"))
            rows = make_rows([np.array(tokens)], [1])  # the response is all tokens except the first
            micro = builder.build(rows, [0])
            expected = (root(micro, 1.0).logprobs if isinstance(root, PolicyModel) else root(micro)).tolist()
    finally:
        shut_down_rank()
    del loaded, root  # their memory is needed for the exported model
    exported = compute_transformers_outputs(Path(output_folder), kind, tokens, model)
    return check_exported_outputs(expected, exported, torch.float32 if form == "adapter" else dtype)
