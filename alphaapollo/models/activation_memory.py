"""Activation memory of a training pass, measured by running the model on the meta device without data.

    config.json -> model on meta -> forward and backward of one and of two of its layers -> bytes

The difference between two layers and one is what each layer saves for backward. The rest does not grow with depth.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alphaapollo.algorithms.divergence import Divergence
from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Lora, Model
from alphaapollo.models.attention.backends import AttentionCall, attend_explicitly, register_backend
from alphaapollo.models.decoder import find_decoder_layers, get_head_size
from alphaapollo.models.lm_head import CHUNK_LOGITS, DivergenceTarget, HeadInput, LmHead, compute_token_stats
from alphaapollo.models.load import load_without_weights
from alphaapollo.models.lora import resolve_target_modules
from alphaapollo.models.policy import read_logit_transform
from alphaapollo.models.sharding import MIN_UNIT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelSizes:
    """Parameter counts of a model, and its KV cache size in an engine."""

    parameters: int
    root: int  # parameters outside the layers that FSDP gathers one at a time: embedding, head, norms
    unit: int  # parameters of the largest such layer; 0 if layers are too small to be gathered separately
    num_layers: int
    head: int  # parameters of the output projection
    tied: bool  # the output projection is the embedding
    hidden_size: int
    kv_elements: int  # key and value elements of one token in all layers
    kv_heads: int


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank, in the dtype of forward and backward."""

    saved: int  # bytes that all layers save for the backward pass
    layer: int  # more bytes during the backward pass of one layer, with its gradients
    head: int  # more bytes than `saved` while the head computes log-probs and gradients, with the head's gradient


def load_meta(model: Model, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of config.json with meta tensors and its attention backend (`padded` for `auto`)."""
    loaded = load_without_weights(model, dtype)
    if loaded.config._attn_implementation == register_backend("padded"):  # not the attention of the model's own code
        kind: Attention = "padded" if model.attention == "auto" else model.attention
        loaded.set_attn_implementation(register_backend(kind, partial(_attend_on_meta, kind)))
    return loaded


def _attend_on_meta(kind: Attention, call: AttentionCall) -> Tensor:
    """Return attention output on the meta device. It keeps the same tensors for backward as the backend `kind`."""
    call.check_supported(kind)
    if kind in ("padded", "sdpa") and (call.softcap is not None or call.sinks is not None):
        call = call.repeat_key_value_heads()
        return attend_explicitly(call, call.query, call.key, call.value, None).transpose(1, 2).contiguous()
    output: Tensor = _FusedKernel.apply(call.query, call.key, call.value)
    return output


class _FusedKernel(torch.autograd.Function):
    """Stand-in for a fused attention kernel, which keeps inputs, output and one number per row of scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, width, size = query.shape
        output = query.new_empty(batch, width, heads, size)
        ctx.save_for_backward(query, key, value, output, query.new_empty(batch, heads, width, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def read_model_sizes(model: PreTrainedModel) -> ModelSizes:
    config = model.config.get_text_config()
    layers = find_decoder_layers(model)
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    units = [count for count in counts if count >= MIN_UNIT]
    total = sum(parameter.numel() for parameter in model.parameters())
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return ModelSizes(
        parameters=total,
        root=total - sum(units),
        unit=max(units, default=0),
        num_layers=len(layers),
        head=model.get_output_embeddings().weight.numel(),
        tied=bool(config.tie_word_embeddings),
        hidden_size=config.hidden_size,
        kv_elements=2 * len(layers) * kv_heads * get_head_size(config),
        kv_heads=kv_heads,
    )


def count_adapter_parameters(model: PreTrainedModel, lora: Lora) -> int:
    """Count the parameters of all adapters: A [rank, in] and B [out, rank] of each adapted layer."""
    targets = set(resolve_target_modules(model, lora))
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in targets]
    return sum(lora.lora_rank * sum(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear))


@dataclass(frozen=True)
class TrainingPass:
    """Configuration of a forward and backward pass over `rows` rows of `length` response tokens."""

    rows: int
    length: int
    checkpointing: bool
    device: str  # cpu or cuda; determines the chunk size of the head
    needs_head: bool = True  # compute log-probs over the vocabulary; false for a critic
    divergence: Divergence | None = None  # divergence from a frozen model's distributions to compute
    adapters: bool = False  # LoRA: base weights and the head get no gradient; the bytes that layers save do not change


def measure_activations(model: PreTrainedModel, training: TrainingPass) -> Activations:
    """Measure the memory of a training pass. `model` comes from load_meta, in the dtype of forward and backward."""
    rows, length = training.rows, training.length
    (first, peak), (second, _) = (_measure_decoder_bytes(model, rows, length, count) for count in (1, 2))
    layer = second - first
    parameter = next(model.parameters())
    hidden = rows * length * model.config.get_text_config().hidden_size * parameter.element_size()
    head = _measure_head_peak(model, training) if training.needs_head else 0
    if training.adapters:
        peak -= parameter.element_size() * read_model_sizes(model).unit
    depth = len(find_decoder_layers(model))
    if training.checkpointing:  # a layer keeps its input and is recomputed in the backward pass
        return Activations(saved=depth * hidden, layer=peak, head=head)
    return Activations(saved=depth * layer, layer=peak - layer, head=head)


def measure_inference_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Measure the peak bytes of a forward pass without gradients, including hidden states."""
    with torch.no_grad():
        return _measure_decoder_bytes(model, 1, num_tokens, 1)[1]


def _measure_decoder_bytes(model: PreTrainedModel, rows: int, length: int, num_layers: int) -> tuple[int, int]:
    """Return (bytes saved for the backward pass, peak bytes) of a pass through the first layers."""
    decoder = model.base_model
    first = find_decoder_layers(model)[0]
    lists = {name: module for name, module in decoder.named_children() if isinstance(module, nn.ModuleList)}
    name, layers = next((name, module) for name, module in lists.items() if module[0] is first)
    setattr(decoder, name, layers[:num_layers])
    positions = torch.zeros(1, length, dtype=torch.long, device="meta")
    size, dtype = model.config.get_text_config().hidden_size, next(model.parameters()).dtype
    with LiveByteCounter(model) as live:
        embeddings = torch.empty(rows, length, size, dtype=dtype, device="meta").requires_grad_()
        total = decoder(inputs_embeds=embeddings, position_ids=positions, use_cache=False)[0].sum()
        saved = live.now
        if torch.is_grad_enabled():
            total.backward()
    setattr(decoder, name, layers)
    model.zero_grad()
    return saved, live.peak


def _measure_head_peak(model: PreTrainedModel, training: TrainingPass) -> int:
    num_tokens, output = (
        training.rows * training.length,
        model.get_output_embeddings().requires_grad_(not training.adapters),
    )
    head = LmHead(output.weight, output.bias, *read_logit_transform(model.config))
    with LiveByteCounter(model) as live:
        size, dtype = output.weight.shape[1], output.weight.dtype
        hidden = HeadInput(torch.empty(num_tokens, size, dtype=dtype, device="meta").requires_grad_(), head)
        targets = torch.empty(num_tokens, dtype=torch.long, device="meta")
        frozen_model = None
        if training.divergence is not None:
            states = torch.empty(num_tokens, size, dtype=dtype, device="meta")
            frozen_model = DivergenceTarget(HeadInput(states, head), training.divergence)
        stats = compute_token_stats(hidden, targets, 1.0, True, frozen_model, CHUNK_LOGITS[training.device])
        total = stats.logprobs.sum()
        (total if stats.divergence is None else total + stats.divergence.sum()).backward()
    model.zero_grad()
    output.requires_grad_(True)
    return live.peak


class LiveByteCounter(TorchDispatchMode):
    """Context manager that counts the live bytes of storages that operations allocate. Parameters and buffers of the
    module `known` do not count."""

    def __init__(self, known: nn.Module):
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}
        for tensor in (*known.parameters(), *known.buffers()):
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:  # its shape function supports bfloat16 only
            result = _grouped_mm(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._remove(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _remove(self, key: int, size: int) -> None:
        if self._alive.pop(key, None) is not None:
            self.now -= size


def _grouped_mm(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the meta result of aten._grouped_mm for any dtype."""
    shapes = (torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in (x, weight))
    return torch.empty_like(torch.ops.aten._grouped_mm.default(*shapes, *args, **kwargs), dtype=x.dtype)
