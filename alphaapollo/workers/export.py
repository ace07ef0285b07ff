"""A checkpoint back into a model that transformers and vLLM load, in one process on the CPU, and proved there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alphaapollo.config.schema import LoraForm, Model
from alphaapollo.data.batch import Rows
from alphaapollo.models.checkpoint.snapshot import load_snapshot
from alphaapollo.models.critic import CriticModel
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.export.hf_folder import export, export_critic
from alphaapollo.models.export.verification import Kind, check_gap, plain_outputs, probe_tokens
from alphaapollo.models.lora import load_trainable_lm, load_trainable_reward_model
from alphaapollo.models.micro_batch import MicroBatch, build_micro_batch
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.reward_model import RewardModel
from alphaapollo.models.sharding import shard
from alphaapollo.workers.process_group import ALONE, RankPlacement, join, leave


def export_checkpoint(
    folder: str, model: Model, dtype: torch.dtype, output: str, form: LoraForm, kind: Kind = "policy"
) -> float:
    """Write the weights in `folder`, saved by a worker of this kind on any number of ranks, to `output`; a fine-tuned
    model is a policy, and a critic becomes a token classifier with one label. form: as of models.export.

    Returns by how much the outputs of a probe differ that transformers alone computes (models/export/verification.py).

    Raises:
        ValueError: the model cannot be loaded, the checkpoint is not of such a model, or what was written computes
            something else.
        OSError: the output cannot be written.
    """
    probe, expected = _write(folder, model, dtype, output, form, kind)
    rounding = torch.float32 if form == "adapter" else dtype  # adapters are written as they are
    return check_gap(expected, plain_outputs(Path(output), kind, probe, model), rounding)


@torch.no_grad()
def _write(
    folder: str, model: Model, dtype: torch.dtype, output: str, form: LoraForm, kind: Kind
) -> tuple[list[int], list[float]]:
    """The probe, and what the checkpoint makes of it; the model is gone again when this returns."""
    groups = join(RankPlacement(0, 1, ALONE, "cpu", torch.get_num_threads()))
    try:
        load = load_trainable_reward_model if kind == "reward model" else load_trainable_lm
        loaded = load(model, "padded", torch.float32, materialize=True, seed=0)
        layers = decoder_layers(loaded)
        trained = _built(kind, loaded)
        shard(trained, layers, groups.shards, torch.float32, False)
        load_snapshot(folder, trained, optimizer=None)
        if isinstance(trained, CriticModel):
            export_critic(output, trained, model, dtype)
        else:
            export(output, loaded, model, dtype, form)
        config = loaded.config.get_text_config()
        probe = probe_tokens(config.vocab_size, config.pad_token_id)
        return probe, [float(value) for value in _outputs(trained, probe_batch(probe))]
    finally:
        leave()


def _built(kind: Kind, loaded: Any) -> PolicyModel | RewardModel | CriticModel:
    if kind == "reward model":
        return RewardModel(loaded)
    return CriticModel(loaded, seed=0) if kind == "critic" else PolicyModel(loaded)


def _outputs(trained: nn.Module, micro: MicroBatch) -> Tensor:
    """Of one row: [T - 1], a reward model's [1]."""
    values: Tensor = trained(micro, 1.0).logprobs if isinstance(trained, PolicyModel) else trained(micro)
    return values


def probe_batch(token_ids: list[int]) -> MicroBatch:
    """One row, whose tokens after the first are its response."""
    scored = len(token_ids) - 1
    rows = Rows(
        token_ids=np.array(token_ids),
        lengths=np.array([len(token_ids)]),
        response_starts=np.array([1]),
        action_mask=np.ones(scored, dtype=np.uint8),
        rollout_logprobs=np.zeros(scored, dtype=np.float32),
    )
    return build_micro_batch(rows, [0], padded=True, device=torch.device("cpu"))
