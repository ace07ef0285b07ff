"""Memory of one model, calculated from its configuration: bytes by kind at each moment of an update.

    config.json on the meta device -> sizes (models/activation_memory.py) -> MemoryUsage of one training rank or engine

The calculation follows the FSDP2 settings of models/sharding.py. Parameters are float32 shards. One layer is gathered
at a time and the next one is prefetched. The root (embedding, head, norms) is gathered from the forward pass to the end
of the backward pass. Gradients are reduced in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from alphaapollo.algorithms.divergence import Divergence
from alphaapollo.config.resolve import Attention, get_attention
from alphaapollo.config.schema import FrozenFsdp, Fsdp, Model
from alphaapollo.config.schema.base import Device
from alphaapollo.models.activation_memory import (
    Activations,
    ModelSizes,
    TrainingPass,
    count_adapter_parameters,
    load_meta,
    measure_activations,
    measure_inference_bytes,
    read_model_sizes,
)

FLOAT32 = 4
ADAM = 2 * FLOAT32  # bytes of two moments per parameter


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
    engine: int = 0  # the engine's weights and activations
    kv_cache: int = 0
    transfer_buckets: int = 0  # buckets of the weight sync
    checkpoint_copy: int = 0  # copy of the state from which a checkpoint is written
    runtime: int = 0  # libraries and CUDA context of the process

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Return field name -> bytes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __add__(self, other: MemoryUsage) -> MemoryUsage:
        return MemoryUsage(**{kind: size + getattr(other, kind) for kind, size in self.by_kind().items()})

    def __mul__(self, count: int) -> MemoryUsage:
        return MemoryUsage(**{kind: size * count for kind, size in self.by_kind().items()})


@dataclass(frozen=True)
class TrainedModel:
    """Memory of a model in training on one rank."""

    sizes: ModelSizes
    activations: Activations
    shards: int  # number of ranks that share one copy of the weights
    dtype_bytes: int  # bytes per element in forward and backward passes
    unsharded_gradients: bool = False  # float32 gradients stay unsharded until the optimizer step
    offload_weights: bool = False  # shards are in host memory between the model's phases
    offload_optimizer: bool = False  # optimizer state is in host memory except during steps
    has_one_step: bool = False  # whether an update has only one optimizer step
    adapters: int = 0  # number of LoRA parameters; 0: all parameters are trained
    offload_policy: bool = False  # shards and optimizer state stay in host memory

    @property
    def slices(self) -> int:
        """Number of trained parameters of this rank."""
        return -(-(self.adapters or self.sizes.parameters) // self.shards)

    @property
    def base(self) -> int:
        """Bytes of this rank's frozen base weights (LoRA)."""
        return self.dtype_bytes * -(-self.sizes.parameters // self.shards) if self.adapters else 0

    def usage_after_step(self) -> MemoryUsage:
        """Return the memory in the model's phase, after an optimizer step."""
        if self.offload_policy:
            return MemoryUsage()
        return MemoryUsage(weights=self.base + FLOAT32 * self.slices, optimizer=ADAM * self.slices)

    def idle(self) -> MemoryUsage:
        """Return the memory between the model's phases."""
        usage = self.usage_after_step()
        return replace(
            usage,
            weights=0 if self.offload_weights else usage.weights,
            optimizer=0 if self.offload_optimizer else usage.optimizer,
        )

    def host_bytes(self) -> int:
        """Return the bytes in host memory between the model's phases."""
        return self.base + (FLOAT32 + ADAM) * self.slices - self.idle().total

    def checkpoint_bytes(self) -> int:
        return (FLOAT32 + ADAM) * self.slices

    def plan_update(self) -> dict[str, MemoryUsage]:
        """Return the memory at each moment of an update, by name."""
        sizes, width, share = self.sizes, self.dtype_bytes, self.activations
        root, unit = sizes.root, sizes.unit
        step, reduction = self.usage_after_step(), FLOAT32
        if not self.offload_policy:
            step += MemoryUsage(gradients=FLOAT32 * self.slices)
        own = replace(step, optimizer=0) if self.offload_optimizer and self.has_one_step else step
        if self.adapters:
            own += MemoryUsage(gathered_layers=width * (root + 2 * unit), activations=share.saved)
            head, layer = MemoryUsage(logits=share.head), MemoryUsage(activations=share.layer)
            return {"head": own + head, "layer": own + layer, "step": step}
        if self.unsharded_gradients:
            own, reduction = own + MemoryUsage(gradients=FLOAT32 * sizes.parameters), 0
        head = MemoryUsage(gathered_layers=width * root, activations=share.saved, logits=share.head)
        layer = MemoryUsage(
            # this layer, the prefetched layer, and the float32 gradients of the last layer
            gathered_layers=width * (root + 2 * unit) + reduction * unit,
            activations=share.saved + share.layer,
            logits=width * sizes.head,  # the head's gradient exists until the embedding's is computed
        )
        gathered = (2 * width + reduction) * root + reduction * root // self.shards
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
    ranks: int,
    micro_batch: tuple[int, int],
    head: bool = True,
    divergence: Divergence | None = None,
) -> TrainedModel:
    """Return the memory of a model in training on one of `ranks` ranks.

    Args:
        model: resolved model section, with its LoRA keys.
        micro_batch: number and length of the rows on one rank.
        head: True: log-probs over the vocabulary; False: one number per token.
        divergence: divergence over the full vocabulary from a frozen model; None: not computed.
    """
    on_gpu, adapts = device == "cuda", bool(model.lora_rank)
    rows, length = micro_batch
    checkpointing = model.enable_gradient_checkpointing is True
    return TrainedModel(
        sizes=load_sizes(model),
        activations=_measure(
            _get_identity(model),
            measure_activations,
            TrainingPass(rows, length, checkpointing, device, head, divergence, adapts),
        ),
        shards=ranks if fsdp.fsdp_size == -1 else fsdp.fsdp_size,
        dtype_bytes=get_dtype_bytes(model.dtype),
        unsharded_gradients=not fsdp.sync_each_micro_batch,
        offload_optimizer=fsdp.optimizer_offload and on_gpu,
        adapters=count_adapter_parameters(_load_meta(_get_identity(model)), model) if adapts else 0,
        offload_policy=fsdp.offload_policy and on_gpu,
    )


def largest_micro_batch(longest: int, step_rows: int, max_tokens: int, ranks: int, shared: int) -> tuple[int, int]:
    """Return number and length of the rows of a rank's largest micro-batch. Its size is the token budget, one longer
    row, or the rank's rows of an optimizer step.

    Args:
        longest: number of tokens of the longest row.
        step_rows: number of rows of an optimizer step, over all ranks.
        max_tokens: token budget of a rank.
        shared: number of ranks that share every sequence.
    """
    step = -(-step_rows // (ranks // shared)) * longest
    tokens = max(longest, min(max_tokens * shared, step)) // shared
    rows = max(1, -(-tokens // longest))
    return rows, max(1, tokens // rows)


@dataclass(frozen=True)
class FrozenModel:
    """Memory of a reference, teacher or reward model on one rank."""

    loaded: MemoryUsage = MemoryUsage()  # memory in its phase
    idle: MemoryUsage = MemoryUsage()  # memory between its phases


def plan_frozen_model(model: Model, fsdp: FrozenFsdp, shards: int, device: Device) -> FrozenModel:
    """Return the memory of a frozen model that is sharded over `shards` ranks."""
    on_gpu = device == "cuda"
    if fsdp.offload_policy and on_gpu:
        return FrozenModel()
    loaded = MemoryUsage(frozen_models=count_frozen_bytes(load_sizes(model), shards, get_dtype_bytes(model.dtype)))
    return FrozenModel(loaded, MemoryUsage() if fsdp.param_offload and on_gpu else loaded)


def count_frozen_bytes(sizes: ModelSizes, shards: int, dtype_bytes: int) -> int:
    """Return the bytes of a frozen model on one rank."""
    return dtype_bytes * -(-sizes.parameters // shards)


def get_dtype_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def load_sizes(model: Model) -> ModelSizes:
    sizes: ModelSizes = _measure(_get_identity(model), read_model_sizes)
    return sizes


def measure_inference(model: Model, num_tokens: int) -> int:
    """Return the bytes of the largest forward pass without gradients, for `num_tokens` tokens."""
    return int(_measure(_get_identity(model), measure_inference_bytes, num_tokens))


Identity = tuple[str, bool, str, Attention]  # path, trust_remote_code, dtype, attention


def _get_identity(model: Model) -> Identity:
    return model.path, model.trust_remote_code, model.dtype, get_attention(model)


@lru_cache(maxsize=4)
def _load_meta(identity: Identity) -> Any:
    path, trust, dtype, attention = identity
    return load_meta(Model(path=path, trust_remote_code=trust, attention=attention), getattr(torch, dtype))


@lru_cache(maxsize=128)
def _measure(identity: Identity, measure: Callable[..., Any], *arguments: Any) -> Any:
    """Return measure(model, *arguments). Results are cached, because measuring runs the model."""
    return measure(_load_meta(identity), *arguments)
