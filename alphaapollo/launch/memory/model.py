"""Memory of one model: bytes by kind at each moment of an update, calculated from its configuration.

    config.json on the meta device -> sizes (models/activation_memory.py) -> MemoryUsage of one training rank or engine

FSDP2 as models/sharding.py sets it up: float32 slices, one layer gathered at a time and the next one prefetched, root
(embedding, head, norms) gathered from the forward to the end of the backward pass, gradients reduced in float32.
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
ADAM = 2 * FLOAT32  # two moments per parameter


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes by kind; the kinds are printed in this order."""

    weights: int = 0  # float32, of what is trained
    gradients: int = 0
    optimizer: int = 0
    frozen_models: int = 0  # reference, teacher, reward model
    gathered_layers: int = 0  # gathered from the other ranks, and gradients to be reduced
    activations: int = 0
    logits: int = 0  # a chunk of them with its gradients
    engine: int = 0  # the engine's weights and activations
    kv_cache: int = 0
    transfer_buckets: int = 0  # of the weight sync
    checkpoint_copy: int = 0  # that a checkpoint is written from
    runtime: int = 0  # of the process: libraries, CUDA context

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Field name -> bytes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __add__(self, other: MemoryUsage) -> MemoryUsage:
        return MemoryUsage(**{kind: size + getattr(other, kind) for kind, size in self.by_kind().items()})

    def __mul__(self, count: int) -> MemoryUsage:
        return MemoryUsage(**{kind: size * count for kind, size in self.by_kind().items()})


@dataclass(frozen=True)
class TrainedModel:
    """A model in training, on one rank."""

    sizes: ModelSizes
    activations: Activations
    shards: int  # ranks that share one copy
    dtype_bytes: int  # of forward and backward
    unsharded_gradients: bool = False  # unsharded float32 until the optimizer step (no reduction per micro-batch)
    offload_weights: bool = False  # slices are in host memory between the model's phases
    offload_optimizer: bool = False  # the optimizer's state is in host memory between a phase and the next step
    has_one_step: bool = False  # an update has one optimizer step
    adapters: int = 0  # LoRA: trained parameters over a frozen base in the compute dtype; 0: all are trained
    offload_policy: bool = False  # slices and optimizer stay in host memory; layers are copied one at a time

    @property
    def slices(self) -> int:
        """Trained parameters of this rank."""
        return -(-(self.adapters or self.sizes.parameters) // self.shards)

    @property
    def base(self) -> int:
        """Bytes of this rank's weights that are not trained."""
        return self.dtype_bytes * -(-self.sizes.parameters // self.shards) if self.adapters else 0

    def usage_after_step(self) -> MemoryUsage:
        """In the model's phase, after an optimizer step."""
        if self.offload_policy:
            return MemoryUsage()
        return MemoryUsage(weights=self.base + FLOAT32 * self.slices, optimizer=ADAM * self.slices)

    def idle(self) -> MemoryUsage:
        """Between the model's phases."""
        usage = self.usage_after_step()
        return replace(
            usage,
            weights=0 if self.offload_weights else usage.weights,
            optimizer=0 if self.offload_optimizer else usage.optimizer,
        )

    def host_bytes(self) -> int:
        """Bytes in host memory between the model's phases."""
        return self.base + (FLOAT32 + ADAM) * self.slices - self.idle().total

    def checkpoint_bytes(self) -> int:
        return (FLOAT32 + ADAM) * self.slices

    def plan_update(self) -> dict[str, MemoryUsage]:
        """Moments of an update."""
        sizes, width, share = self.sizes, self.dtype_bytes, self.activations
        root, unit = sizes.root, sizes.unit
        step, reduction = self.usage_after_step(), FLOAT32
        if not self.offload_policy:
            step += MemoryUsage(gradients=FLOAT32 * self.slices)
        own = replace(step, optimizer=0) if self.offload_optimizer and self.has_one_step else step
        if self.adapters:
            own += MemoryUsage(gathered_layers=width * (root + 2 * unit), activations=share.kept)
            head, layer = MemoryUsage(logits=share.head), MemoryUsage(activations=share.layer)
            return {"head": own + head, "layer": own + layer, "step": step}
        if self.unsharded_gradients:
            own, reduction = own + MemoryUsage(gradients=FLOAT32 * sizes.parameters), 0
        head = MemoryUsage(gathered_layers=width * root, activations=share.kept, logits=share.head)
        layer = MemoryUsage(
            # this layer, the prefetched one, and the float32 gradients of the last, freed when the next ones come
            gathered_layers=width * (root + 2 * unit) + reduction * unit,
            activations=share.kept + share.layer,
            logits=width * sizes.head,  # the head's gradient waits for the embedding's
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
    against: Divergence | None = None,
) -> TrainedModel:
    """A model in training on one of `ranks`.

    Args:
        model: resolved, with its LoRA.
        micro_batch: number of rows and their length, on one rank.
        head: log-probs over the vocabulary, not one number per token.
        against: divergence between whole distributions and those of a frozen model.
    """
    on_gpu, adapts = device == "cuda", bool(model.lora_rank)
    rows, length = micro_batch
    checkpointing = model.enable_gradient_checkpointing is True
    return TrainedModel(
        sizes=load_sizes(model),
        activations=_measure(
            _identity(model),
            measure_activations,
            TrainingPass(rows, length, checkpointing, device, head, against, adapts),
        ),
        shards=ranks if fsdp.fsdp_size == -1 else fsdp.fsdp_size,
        dtype_bytes=get_dtype_bytes(model.dtype),
        unsharded_gradients=not fsdp.sync_each_micro_batch,
        offload_optimizer=fsdp.optimizer_offload and on_gpu,
        adapters=count_adapter_parameters(_meta(_identity(model)), model) if adapts else 0,
        offload_policy=fsdp.offload_policy and on_gpu,
    )


def largest_micro_batch(longest: int, step_rows: int, max_tokens: int, ranks: int, shared: int) -> tuple[int, int]:
    """Number and length of the rows of a rank's largest micro-batch: its token budget, one longer row, or all of an
    optimizer step's rows on this rank.

    Args:
        longest: tokens of the longest row.
        step_rows: rows of an optimizer step, over all ranks.
        max_tokens: token budget of a rank.
        shared: ranks that share every sequence; each has a part of their rows.
    """
    step = -(-step_rows // (ranks // shared)) * longest
    tokens = max(longest, min(max_tokens * shared, step)) // shared
    rows = max(1, -(-tokens // longest))
    return rows, max(1, tokens // rows)


@dataclass(frozen=True)
class FrozenModel:
    """Memory of a reference, teacher or reward model on one rank."""

    loaded: MemoryUsage = MemoryUsage()  # in its phase
    idle: MemoryUsage = MemoryUsage()  # between its phases


def plan_frozen_model(model: Model, fsdp: FrozenFsdp, shards: int, device: Device) -> FrozenModel:
    """A frozen model that `shards` ranks share."""
    on_gpu = device == "cuda"
    if fsdp.offload_policy and on_gpu:
        return FrozenModel()
    loaded = MemoryUsage(frozen_models=count_frozen_bytes(load_sizes(model), shards, get_dtype_bytes(model.dtype)))
    return FrozenModel(loaded, MemoryUsage() if fsdp.param_offload and on_gpu else loaded)


def count_frozen_bytes(sizes: ModelSizes, shards: int, dtype_bytes: int) -> int:
    """Bytes of a frozen model on one rank."""
    return dtype_bytes * -(-sizes.parameters // shards)


def get_dtype_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def load_sizes(model: Model) -> ModelSizes:
    sizes: ModelSizes = _measure(_identity(model), read_model_sizes)
    return sizes


def measure_inference(model: Model, num_tokens: int) -> int:
    """Bytes of the largest forward pass without gradients."""
    return int(_measure(_identity(model), measure_inference_bytes, num_tokens))


Identity = tuple[str, bool, str, Attention]  # of a model on the meta device: path, trust_remote_code, dtype, attention


def _identity(model: Model) -> Identity:
    return model.path, model.trust_remote_code, model.dtype, get_attention(model)


@lru_cache(maxsize=4)
def _meta(identity: Identity) -> Any:
    path, trust, dtype, attention = identity
    return load_meta(Model(path=path, trust_remote_code=trust, attention=attention), getattr(torch, dtype))


@lru_cache(maxsize=128)
def _measure(identity: Identity, measure: Callable[..., Any], *arguments: Any) -> Any:
    """`measure(model, *arguments)`, because measuring runs the model."""
    return measure(_meta(identity), *arguments)
