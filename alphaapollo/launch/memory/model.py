"""Calculate the memory of one model from its configuration: bytes by kind in each phase of an update.

    config.json on the meta device -> sizes (models/activation_memory.py) -> MemoryUsage of one training rank or engine

The calculation follows the FSDP2 settings of models/sharding.py. Parameters are float32 shards. One layer is gathered
at a time (with expert parallelism, a part of its experts) and the next one is prefetched. The root (embedding, head,
norms) is gathered from the forward pass to the end of the backward pass. Gradients are reduced in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from alphaapollo.algorithms.divergence import Divergence
from alphaapollo.config.resolve import Attention, get_attention_kernel
from alphaapollo.config.schema import FrozenFsdp, Fsdp, Model, RoleFsdp
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.model import OptimizerName
from alphaapollo.models.activation_memory import (
    ActivationBytes,
    ModelSizes,
    TrainingPass,
    count_adapter_parameters,
    estimate_picture_bytes,
    load_on_meta_device,
    measure_activation_bytes,
    measure_inference_bytes,
    read_model_sizes,
)
from alphaapollo.models.load import load_config

FLOAT32 = 4
ADAM = 2 * FLOAT32  # bytes of two moments per parameter
ADAM_8BIT = 2 * (1 + FLOAT32 / 256)  # two codes, and two scales per block of 256 parameters
CERTAIN_KINDS = ("weights", "gradients", "optimizer", "frozen_models", "engine_weights", "kv_cache")


@dataclass(frozen=True)
class MemoryUsage:
    """Memory in bytes by kind, in the order in which they are printed."""

    weights: int = 0  # float32 weights of trained parameters
    gradients: int = 0
    optimizer: int = 0
    frozen_models: int = 0  # weights of reference, teacher and reward model
    gathered_layers: int = 0  # layers gathered from all ranks, and gradients to be reduced
    activations: int = 0
    logits: int = 0  # one chunk of logits with its gradients
    engine_weights: int = 0
    engine_buffers: int = 0  # the engine's activations, logits, CUDA context and received weights
    kv_cache: int = 0
    transfer_buckets: int = 0  # buckets of the weight sync
    checkpoint_copy: int = 0  # copy of the state from which a checkpoint is written
    runtime: int = 0  # libraries and CUDA context of the process

    @property
    def total(self) -> int:
        return sum(self.to_dict().values())

    @property
    def certain(self) -> MemoryUsage:
        """The kinds that are known exactly; the others are estimates."""
        return MemoryUsage(**{kind: getattr(self, kind) for kind in CERTAIN_KINDS})

    def to_dict(self) -> dict[str, int]:
        """Return {field name: bytes}, e.g. {"weights": 4096, "gradients": 4096, ...}."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __add__(self, other: MemoryUsage) -> MemoryUsage:
        return MemoryUsage(**{kind: size + getattr(other, kind) for kind, size in self.to_dict().items()})

    def __mul__(self, count: int) -> MemoryUsage:
        return MemoryUsage(**{kind: size * count for kind, size in self.to_dict().items()})


@dataclass(frozen=True)
class TrainedModelMemory:
    """Memory of a trained model (policy, critic, fine-tuned model) on one rank."""

    sizes: ModelSizes
    activations: ActivationBytes
    shards: int  # number of ranks that share one copy of the weights
    dtype_bytes: int  # bytes per element in forward and backward passes
    unsharded_gradients: bool = False  # float32 gradients stay unsharded until the optimizer step
    offload_weights: bool = False  # shards are in host memory while another model uses the GPU
    offload_optimizer: bool = False  # optimizer state is in host memory except during steps
    has_one_step_per_update: bool = False  # one optimizer step per update, not several
    num_lora_parameters: int = 0  # 0: all parameters are trained
    offload_policy: bool = False  # shards and optimizer state stay in host memory
    ep_size: int = 1  # number of ranks that split the experts of a layer
    freezes_vision: bool = False
    optimizer: OptimizerName = "adamw"

    @property
    def gathered_layer_parameters(self) -> int:
        """Parameters of the largest layer after FSDP has gathered it on this rank."""
        return self.sizes.layer_parameters - self._count_others(self.sizes.layer_expert_parameters)

    def _count_others(self, expert_parameters: int) -> int:
        """Return how many of a number of expert parameters belong to other ranks."""
        return expert_parameters - expert_parameters // self.ep_size

    @property
    def frozen_vision_parameters(self) -> int:
        """Number of parameters of a frozen vision tower, beside trained parameters of the language model."""
        return self.sizes.vision_parameters if self.freezes_vision and not self.num_lora_parameters else 0

    @property
    def num_trained_parameters(self) -> int:
        """Number of values in this rank's shards of the trained parameters."""
        trained = self.num_lora_parameters or self.sizes.parameters - self.frozen_vision_parameters
        return -(-trained // self.shards)

    @property
    def frozen_base_bytes(self) -> int:
        """Bytes of this rank's shards of frozen weights: with LoRA all base weights, else those of a frozen tower."""
        if self.num_lora_parameters:
            return self.dtype_bytes * -(-self.sizes.parameters // self.shards)
        return FLOAT32 * -(-self.frozen_vision_parameters // self.shards)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this rank's optimizer state."""
        trained, sizes = self.num_trained_parameters, self.sizes
        if self.optimizer == "adamw_8bit":
            return math.ceil(ADAM_8BIT * trained)
        in_layers = sizes.parameters - sizes.root_parameters - sizes.expert_parameters
        matrices = trained if self.num_lora_parameters else in_layers // self.shards
        return ADAM * trained - FLOAT32 * matrices * (self.optimizer == "muon")  # Muon has one moment

    def usage_after_step(self) -> MemoryUsage:
        """Return the memory while the model is on the device, after an optimizer step."""
        if self.offload_policy:
            return MemoryUsage()
        return MemoryUsage(
            weights=self.frozen_base_bytes + FLOAT32 * self.num_trained_parameters, optimizer=self.optimizer_bytes
        )

    def usage_while_idle(self) -> MemoryUsage:
        """Return the memory on the device while another model uses it."""
        usage = self.usage_after_step()
        adapters = FLOAT32 * self.num_trained_parameters if self.num_lora_parameters else 0
        return replace(
            usage,
            weights=min(adapters, usage.weights) if self.offload_weights else usage.weights,
            optimizer=0 if self.offload_optimizer else usage.optimizer,
        )

    def offloaded_bytes(self) -> int:
        """Return the bytes of this model that are in host memory while another model uses the device."""
        return self.frozen_base_bytes + self.checkpoint_bytes() - self.usage_while_idle().total

    def checkpoint_bytes(self) -> int:
        """Return the bytes of this rank's part of a checkpoint: float32 weights and the optimizer state."""
        return FLOAT32 * self.num_trained_parameters + self.optimizer_bytes

    def usage_during_update(self) -> dict[str, MemoryUsage]:
        """Return {phase: memory} of an update. Phases `head`, `layer`, `root` (not with LoRA): this part of the model
        computes. Phase `step`: the optimizer step."""
        sizes, width, share = self.sizes, self.dtype_bytes, self.activations
        root, unit = sizes.root_parameters, self.gathered_layer_parameters
        step, reduction = self.usage_after_step(), FLOAT32
        if not self.offload_policy:
            step += MemoryUsage(gradients=FLOAT32 * self.num_trained_parameters)
        own = replace(step, optimizer=0) if self.offload_optimizer and self.has_one_step_per_update else step
        if self.num_lora_parameters:
            own += MemoryUsage(gathered_layers=width * (root + 2 * unit), activations=share.saved)
            head, layer = MemoryUsage(logits=share.head_peak), MemoryUsage(activations=share.layer_peak)
            return {"head": own + head, "layer": own + layer, "step": step}
        if self.unsharded_gradients:
            unsharded = sizes.parameters - self._count_others(sizes.expert_parameters) - self.frozen_vision_parameters
            own, reduction = own + MemoryUsage(gradients=FLOAT32 * unsharded), 0
        head = MemoryUsage(gathered_layers=width * root, activations=share.saved, logits=share.head_peak)
        layer = MemoryUsage(
            # this layer, the prefetched layer, and the float32 gradients of the last layer
            gathered_layers=width * (root + 2 * unit) + reduction * unit,
            activations=share.saved + share.layer_peak,
            logits=width * sizes.head_parameters,  # the head's gradient exists until the embedding's is computed
        )
        trained = root - self.frozen_vision_parameters
        gathered = width * root + (width + reduction) * trained + reduction * trained // self.shards
        return {
            "head": own + head,
            "layer": own + layer,
            "root": own + MemoryUsage(gathered_layers=gathered),
            "step": step,
        }


def plan_trained_model(
    model: Model,
    fsdp: Fsdp,
    device: Device,
    num_ranks: int,
    micro_batch_shape: tuple[int, int],
    image_tokens_per_row: int,
    computes_logits: bool = True,
    divergence: Divergence | None = None,
) -> TrainedModelMemory:
    """Return the memory of a trained model on one rank.

    Args:
        model: resolved model section, with its LoRA keys.
        micro_batch_shape: (rows, tokens per row) on one rank.
        image_tokens_per_row: the most image tokens that a row may have, if the model reads pictures.
        computes_logits: True: log-probs over the vocabulary (policy); False: one number per token (critic).
        divergence: divergence from a frozen model, over the full vocabulary, in the loss; None if there is none.
    """
    on_gpu, adapts = device == "cuda", bool(model.lora_rank)
    rows, length = micro_batch_shape
    checkpointing = model.enable_gradient_checkpointing is True
    activations: ActivationBytes = _measure_on_meta_model(
        _make_model_key(model),
        measure_activation_bytes,
        TrainingPass(rows, length, checkpointing, device, computes_logits, divergence, adapts, fsdp.ep_size),
    )
    trains_vision = not (model.freeze_vision or adapts)
    image_tokens, width = rows * min(length, image_tokens_per_row), get_dtype_bytes(model.dtype)
    pictures = estimate_picture_bytes(load_config(model), image_tokens, width, trains_vision, checkpointing)
    return TrainedModelMemory(
        sizes=load_model_sizes(model),
        activations=replace(activations, saved=activations.saved + pictures),
        freezes_vision=model.freeze_vision,
        shards=fsdp.count_shards(num_ranks),
        dtype_bytes=width,
        ep_size=fsdp.ep_size,
        unsharded_gradients=not fsdp.sync_each_micro_batch,
        offload_optimizer=fsdp.optimizer_offload and on_gpu,
        num_lora_parameters=count_adapter_parameters(_load_meta_model(_make_model_key(model)), model) if adapts else 0,
        offload_policy=fsdp.offload_policy and on_gpu,
    )


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


@dataclass(frozen=True)
class FrozenModelMemory:
    """Memory of a frozen model (reference, teacher or reward model) on one rank."""

    loaded: MemoryUsage = MemoryUsage()  # while the model computes
    idle: MemoryUsage = MemoryUsage()  # while another model uses the device


def plan_frozen_model(
    model: Model, fsdp: FrozenFsdp | RoleFsdp, shards: int, device: Device, dtype_bytes: int | None = None
) -> FrozenModelMemory:
    """Return the memory of a frozen model that is sharded over `shards` ranks. dtype_bytes: of its stored weights; None
    = those of model.dtype."""
    on_gpu = device == "cuda"
    if fsdp.offload_policy and on_gpu:
        return FrozenModelMemory()
    width = dtype_bytes or get_dtype_bytes(model.dtype)
    loaded = MemoryUsage(frozen_models=count_frozen_bytes(load_model_sizes(model), shards, width))
    return FrozenModelMemory(loaded, MemoryUsage() if fsdp.param_offload and on_gpu else loaded)


def count_frozen_bytes(sizes: ModelSizes, shards: int, dtype_bytes: int) -> int:
    """Return the bytes of a frozen model's weights on one of `shards` ranks."""
    return dtype_bytes * -(-sizes.parameters // shards)


def get_dtype_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def count_loading_bytes(model: Model) -> int:
    """Return the bytes of host memory in which rank 0 loads the model, in the dtype of its files."""
    return (load_config(model).dtype or torch.float32).itemsize * load_model_sizes(model).parameters


def load_model_sizes(model: Model) -> ModelSizes:
    return _measure_on_meta_model(_make_model_key(model), read_model_sizes)


def measure_forward_bytes(model: Model, num_tokens: int) -> int:
    """Return the bytes of activations in a forward pass without gradients over `num_tokens` tokens."""
    return int(_measure_on_meta_model(_make_model_key(model), measure_inference_bytes, num_tokens))


ModelKey = tuple[str, bool, str, Attention]  # path, trust_remote_code, dtype, attention


def _make_model_key(model: Model) -> ModelKey:
    return model.path, model.trust_remote_code, model.dtype, get_attention_kernel(model)


@lru_cache(maxsize=4)
def _load_meta_model(key: ModelKey) -> object:
    path, trust, dtype, attention = key
    return load_on_meta_device(Model(path=path, trust_remote_code=trust, attention=attention), getattr(torch, dtype))


@lru_cache(maxsize=128)
def _measure_on_meta_model(key: ModelKey, measure: Callable[..., object], *arguments: object) -> Any:
    """Return measure(model, *arguments) for the model on the meta device. Results are cached, because `measure` runs
    the model."""
    return measure(_load_meta_model(key), *arguments)
