"""Estimate the memory of one model on a rank: bytes by kind while it is idle, after a step, and in an update.

The estimate follows the FSDP2 settings of models/sharding.py. Parameters are float32 shards. One layer is gathered at a
time (with expert parallelism, a part of its experts) and the next one is prefetched. The root (embedding, head, norms)
is gathered from the forward pass to the end of the backward pass. Gradients are reduced in float32.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import Model
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.model import Fsdp, PolicyOptimizerName
from alphaapollo.models.activation_memory import (
    ModelSizes,
    count_adapter_parameters,
    estimate_image_bytes,
    load_on_meta_device,
    measure_layer_bytes,
    read_model_sizes,
)
from alphaapollo.models.lm_head import CHUNK_LOGITS
from alphaapollo.models.load import load_config

GIB = 2**30
FLOAT32 = 4
MOMENTS = {"adamw": 2 * FLOAT32, "adamw_8bit": 2 * (1 + FLOAT32 / 256), "muon": FLOAT32, "trpo": 5 * FLOAT32}
"""Bytes per parameter. TRPO keeps no state, but has the old weights and four vectors during a step."""
LOGIT_COPIES, DIVERGENCE_COPIES = 4, 6  # float32 copies of a chunk of logits; with those of a frozen model

Usage = Counter[str]
"""Kind of memory -> bytes."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model on one rank, and the settings that determine its memory."""

    sizes: ModelSizes
    fsdp: Fsdp  # without offloading on a CPU
    shards: int  # number of ranks that share one copy of the weights
    dtype_bytes: int  # bytes per element in forward and backward passes
    saved_bytes: int = 0  # activations that all layers save for the backward pass
    layer_bytes: int = 0  # further activations while a layer computes its gradients
    head_bytes: int = 0  # logits of a chunk with their gradients
    adapter_parameters: int = 0  # 0: all parameters are trained
    freezes_vision: bool = False
    optimizer: PolicyOptimizerName = "adamw"
    steps_per_update: int = 2

    def count_others(self, expert_parameters: int) -> int:
        """Return how many of a number of expert parameters belong to other ranks."""
        return expert_parameters - expert_parameters // self.fsdp.ep_size

    @property
    def gathered_layer_parameters(self) -> int:
        """Parameters of the largest layer after FSDP has gathered it on this rank."""
        return self.sizes.layer_parameters - self.count_others(self.sizes.layer_expert_parameters)

    @property
    def frozen_vision_parameters(self) -> int:
        return self.sizes.vision_parameters if self.freezes_vision and not self.adapter_parameters else 0

    @property
    def trained_parameters(self) -> int:
        """Number of values in this rank's shards of the trained parameters."""
        trained = self.adapter_parameters or self.sizes.parameters - self.frozen_vision_parameters
        return -(-trained // self.shards)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of this rank's shards of frozen weights: with LoRA all base weights, else those of a frozen tower."""
        if self.adapter_parameters:
            return self.dtype_bytes * -(-self.sizes.parameters // self.shards)
        return FLOAT32 * -(-self.frozen_vision_parameters // self.shards)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of this rank's part of a checkpoint: float32 weights and the optimizer state."""
        return FLOAT32 * self.trained_parameters + self.optimizer_bytes

    @property
    def optimizer_bytes(self) -> int:
        return math.ceil(MOMENTS[self.optimizer] * self.trained_parameters)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of this model that are in host memory while another model uses the device."""
        return self.frozen_bytes + self.checkpoint_bytes - estimate_idle(self).total()


def estimate_state(model: TrainedModel) -> Usage:
    """Estimate the memory of a model on the device after an optimizer step."""
    if model.fsdp.offload_policy:
        return Usage()
    return Usage(
        {"weights": model.frozen_bytes + FLOAT32 * model.trained_parameters, "optimizer": model.optimizer_bytes}
    )


def estimate_idle(model: TrainedModel) -> Usage:
    """Estimate the memory of a model while another one uses the device."""
    offloaded = {"weights": getattr(model.fsdp, "param_offload", False), "optimizer": model.fsdp.optimizer_offload}
    return Usage({kind: size for kind, size in estimate_state(model).items() if not offloaded[kind]})


def estimate_update(model: TrainedModel) -> Usage:
    """Estimate the memory of an update at its peak: in the head, in a layer, in the reduction of the root's gradients
    or in the optimizer step."""
    sizes, width, fsdp = model.sizes, model.dtype_bytes, model.fsdp
    root, unit, all_trained = sizes.root_parameters, model.gathered_layer_parameters, not model.adapter_parameters
    step, reduction = estimate_state(model), FLOAT32 * all_trained
    step["gradients"] = 0 if fsdp.offload_policy else FLOAT32 * model.trained_parameters
    own = Usage(step)
    if fsdp.optimizer_offload and model.steps_per_update == 1:
        del own["optimizer"]
    if all_trained and not fsdp.sync_each_micro_batch:  # float32 gradients stay unsharded until the optimizer step
        unsharded = sizes.parameters - model.count_others(sizes.expert_parameters) - model.frozen_vision_parameters
        own["gradients"] += FLOAT32 * unsharded
        reduction = 0
    trained_root = (root - model.frozen_vision_parameters) * all_trained
    head = {"gathered layers": width * root, "activations": model.saved_bytes, "logits": model.head_bytes}
    layer = {
        # this layer, the prefetched layer, and the gradients of the last layer
        "gathered layers": width * (root + 2 * unit) + reduction * unit,
        "activations": model.saved_bytes + model.layer_bytes,
        "logits": width * sizes.head_parameters * all_trained,  # the head's gradient exists until the embedding's does
    }
    last = {
        "gathered layers": width * (root + trained_root) + reduction * (trained_root + trained_root // model.shards)
    }
    return max(own + Usage(head), own + Usage(layer), own + Usage(last), step, key=Usage.total)


def make_trained_model(
    model: Model,
    fsdp: Fsdp,
    device: Device,
    num_ranks: int,
    micro_batch_shape: tuple[int, int],
    image_tokens_per_row: int = 0,
    logit_copies: int = LOGIT_COPIES,
    optimizer: PolicyOptimizerName = "adamw",
    steps_per_update: int = 2,
) -> TrainedModel:
    """Read the sizes of a trained model and measure its activations.

    Args:
        model: resolved model section, with its LoRA keys.
        micro_batch_shape: (rows, tokens per row) on one rank.
        image_tokens_per_row: the most image tokens that a row may have, if the model reads images.
        logit_copies: copies of a chunk of logits; 0: the model computes one number per token or row.
    """
    (rows, length), sizes, width = micro_batch_shape, load_model_sizes(model), get_dtype_bytes(model.dtype)
    adapts, checkpointing = bool(model.lora_rank), model.enable_gradient_checkpointing is True
    layer = _measure_layer_bytes(_make_model_key(model), rows, length)
    saved = rows * length * sizes.hidden_size * width if checkpointing else layer  # with checkpointing: its input
    images = estimate_image_bytes(
        load_config(model),
        rows * min(length, image_tokens_per_row),
        width,
        not (model.freeze_vision or adapts),
        checkpointing,
    )
    without = {} if device == "cuda" else {"optimizer_offload": False, "offload_policy": False, "param_offload": False}
    trained = TrainedModel(
        sizes,
        fsdp.model_copy(update={key: value for key, value in without.items() if hasattr(fsdp, key)}),
        fsdp.count_shards(num_ranks),
        width,
        saved_bytes=sizes.num_layers * saved + images,
        head_bytes=min(CHUNK_LOGITS[device], rows * length * (sizes.head_parameters // sizes.hidden_size))
        * FLOAT32
        * logit_copies
        + (FLOAT32 + width) * sizes.head_parameters * bool(logit_copies and not adapts),
        adapter_parameters=count_adapter_parameters(_load_meta_model(_make_model_key(model)), model) if adapts else 0,
        freezes_vision=model.freeze_vision,
        optimizer=optimizer,
        steps_per_update=steps_per_update,
    )
    gradients = 0 if adapts else width * trained.gathered_layer_parameters
    return replace(trained, layer_bytes=gradients + (layer if checkpointing else 0) + layer // 3)


def get_dtype_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else FLOAT32


def count_frozen_bytes(model: Model, shards: int, dtype: str) -> int:
    """Return the bytes of a frozen model's weights on one of `shards` ranks."""
    return get_dtype_bytes(dtype) * -(-load_model_sizes(model).parameters // shards)


def count_loading_bytes(model: Model) -> int:
    """Return the bytes of host memory in which rank 0 loads the model, in the dtype of its files."""
    return (load_config(model).dtype or torch.float32).itemsize * load_model_sizes(model).parameters


def compute_micro_batch_shape(
    longest_row: int, rows_per_step: int, max_tokens: int, num_ranks: int, sequence_parallel_size: int
) -> tuple[int, int]:
    """Return (rows, tokens per row) of the largest micro-batch on a rank. A row is one token sequence.

    Args:
        longest_row: number of tokens of the longest row. Micro-batches have at least this size, even above max_tokens.
        rows_per_step: number of rows of an optimizer step, over all ranks.
        max_tokens: token budget of a micro-batch on a rank.
        sequence_parallel_size: number of ranks that share every row.
    """
    step = -(-rows_per_step // (num_ranks // sequence_parallel_size)) * longest_row
    tokens = max(longest_row, min(max_tokens * sequence_parallel_size, step)) // sequence_parallel_size
    rows = max(1, -(-tokens // longest_row))
    return rows, max(1, tokens // rows)


def load_model_sizes(model: Model) -> ModelSizes:
    return _read_model_sizes(_make_model_key(model))


ModelKey = tuple[str, bool, str, str]  # path, trust_remote_code, dtype, attention


def _make_model_key(model: Model) -> ModelKey:
    return model.path, model.trust_remote_code, model.dtype, get_attention_kernel(model)


@lru_cache(maxsize=4)
def _load_meta_model(key: ModelKey) -> Any:
    path, trust, dtype, attention = key
    section = Model.model_validate({"path": path, "trust_remote_code": trust, "attention": attention})
    return load_on_meta_device(section, getattr(torch, dtype))


@lru_cache(maxsize=16)
def _read_model_sizes(key: ModelKey) -> ModelSizes:
    return read_model_sizes(_load_meta_model(key))


@lru_cache(maxsize=128)
def _measure_layer_bytes(key: ModelKey, num_rows: int, row_length: int) -> int:
    return measure_layer_bytes(_load_meta_model(key), num_rows, row_length)


def measure_pass(model: Model, num_tokens: int) -> Usage:
    """Estimate the layers and activations of a forward pass: two thirds of what a layer saves for its backward pass."""
    sizes = load_model_sizes(model)
    layers = get_dtype_bytes(model.dtype) * (sizes.root_parameters + 2 * sizes.layer_parameters)
    activations = 2 * _measure_layer_bytes(_make_model_key(model), 1, num_tokens) // 3
    return Usage({"gathered layers": layers, "activations": activations})
