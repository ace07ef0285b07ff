"""A model's memory before it is loaded: its configuration on the meta device, measured once and kept. The bytes of a
whole run are in memory.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from alphaapollo.algorithms.divergence import Divergence
from alphaapollo.config.resolve import Attention, chosen_attention
from alphaapollo.config.schema import Fsdp, Model
from alphaapollo.config.schema.base import Device
from alphaapollo.models.activations import (
    Activations,
    MetaModel,
    ModelSizes,
    activations,
    adapter_parameters,
    inference_bytes,
    load_meta,
    model_sizes,
)
from alphaapollo.models.footprint import Held, Trained

GIB = 2**30
RUNTIME = {"cuda": GIB, "cpu": GIB * 6 // 10}  # a process: CUDA's context and NCCL's buffers; imported libraries
RAY = GIB * 9 // 10  # of Ray's own processes on a node
COMFORT = 0.9  # of a device: the allocator's gaps take the rest
NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimiser": "optimiser",
    "frozen": "reference, teacher and reward model",
    "gathered": "gathered layers",
    "activations": "activations",
    "logits": "logits chunk",
    "engine": "engine",
    "kv_cache": "KV cache",
    "buckets": "transfer buckets",
    "checkpoint": "copy for a checkpoint",
    "runtime": "runtime",
}


@dataclass(frozen=True)
class MemoryPlan:
    """What one device holds at each moment of an iteration."""

    moments: dict[str, Held]
    capacity: int  # bytes; 0: not known
    what: str  # the device, for people
    kv_tokens: int  # that an engine's cache has room for
    host: int = 0  # bytes in a node's own memory, of what GPUs put there between phases
    copies: int = 0  # bytes in a node's own memory, of what checkpoints are written from
    saves_in_background: bool = True  # there is room for them
    problem: str = ""  # why it cannot work, and the keys that help

    @property
    def peak(self) -> tuple[str, Held]:
        return max(self.moments.items(), key=lambda item: item[1].total)

    @property
    def fits(self) -> bool:
        return not self.capacity or self.peak[1].total <= self.capacity

    @property
    def comfortable(self) -> bool:
        return not self.capacity or self.peak[1].total <= COMFORT * self.capacity


def with_copies(plan: MemoryPlan, device: Device, host: int) -> MemoryPlan:
    """The plan with the copies that checkpoints are written from, where there is room for them.

    host: bytes of a GPU machine's own memory; 0: not known.
    """
    if device == "cuda":
        return replace(plan, saves_in_background=not host or plan.host + plan.copies <= COMFORT * host)
    copies = Held(checkpoint=plan.copies)
    behind = replace(plan, moments={name: held + copies for name, held in plan.moments.items()})
    return behind if behind.comfortable else replace(plan, saves_in_background=False)


def trained_model(
    model: Model,
    fsdp: Fsdp,
    device: Device,
    ranks: int,
    micro_batch: tuple[int, int],
    head: bool = True,
    against: Divergence | None = None,
) -> Trained:
    """A model in training on one of `ranks`.

    Args:
        model: resolved, with its LoRA.
        micro_batch: rows and their length, on one rank.
        head: log-probs over the vocabulary, not one number a token.
        against: how whole distributions are compared with a frozen model's.
    """
    on_gpu, adapts = device == "cuda", bool(model.lora_rank)
    rows, length = micro_batch
    checkpointing = model.enable_gradient_checkpointing is True
    return Trained(
        sizes=sizes_of(model),
        activations=_activations(_identity(model), rows, length, checkpointing, device, head, against, adapts),
        shards=ranks if fsdp.fsdp_size == -1 else fsdp.fsdp_size,
        dtype_bytes=bytes_of(model.dtype),
        whole_gradients=not fsdp.sync_each_micro_batch,
        rest_optimizer=fsdp.optimizer_offload and on_gpu,
        adapters=adapter_parameters(_meta(_identity(model)), model) if adapts else 0,
        offload_policy=fsdp.offload_policy and on_gpu,
    )


def largest_micro_batch(longest: int, step_rows: int, max_tokens: int, ranks: int, shared: int) -> tuple[int, int]:
    """Rows and their length of the largest micro-batch of one rank: its token budget, or one row that is longer, or all
    that an optimiser step has for it.

    Args:
        longest: tokens of the longest row.
        step_rows: of an optimiser step, over all ranks.
        max_tokens: the budget of a rank.
        shared: ranks that share every sequence; each has a part of their rows.
    """
    step = -(-step_rows // (ranks // shared)) * longest
    tokens = max(longest, min(max_tokens * shared, step)) // shared
    rows = max(1, -(-tokens // longest))
    return rows, max(1, tokens // rows)


UNMEASURED = (RuntimeError, TypeError, AttributeError, LookupError)  # of a model's code that cannot run without data


def unmeasured_notice(path: str, error: BaseException, may_choose: bool) -> str:
    """What to tell where one of these came of planning."""
    reason = str(error).strip().split("\n")[0]
    chosen = ", and gradient checkpointing stays off" * may_choose
    return f"the memory of {path} is not planned{chosen}: without data it ends with {type(error).__name__}: {reason}"


def bytes_of(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def sizes_of(model: Model) -> ModelSizes:
    return _sizes(_identity(model))


def inference_of(model: Model, num_tokens: int) -> int:
    """Bytes of the largest forward pass without gradients."""
    return _inference(_identity(model), num_tokens)


Identity = tuple[str, bool, str, Attention]  # of a model on meta: path, trust_remote_code, dtype, attention


def _identity(model: Model) -> Identity:
    return model.path, model.trust_remote_code, model.dtype, chosen_attention(model)


@lru_cache(maxsize=4)
def _meta(identity: Identity) -> MetaModel:
    path, trust, dtype, attention = identity
    return load_meta(Model(path=path, trust_remote_code=trust, attention=attention), getattr(torch, dtype))


@lru_cache(maxsize=16)
def _sizes(identity: Identity) -> ModelSizes:
    return model_sizes(_meta(identity))


@lru_cache(maxsize=64)
def _activations(
    identity: Identity,
    rows: int,
    length: int,
    checkpointing: bool,
    device: Device,
    head: bool,
    against: Divergence | None,
    adapters: bool,
) -> Activations:
    return activations(_meta(identity), rows, length, checkpointing, device, head, against, adapters)


@lru_cache(maxsize=64)
def _inference(identity: Identity, tokens: int) -> int:
    return inference_bytes(_meta(identity), tokens)
