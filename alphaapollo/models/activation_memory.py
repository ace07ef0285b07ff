"""Sizes of a model on the meta device, which allocates nothing, and what a layer saves for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from alphaapollo.config.resolve import Attention
from alphaapollo.config.schema import Lora, Model
from alphaapollo.models.attention import AttentionCall, attend_eager, register_attn_implementation
from alphaapollo.models.decoder import (
    find_decoder_layers,
    find_language_model,
    find_vision_modules,
    get_attention_head_size,
)
from alphaapollo.models.load import load_without_weights
from alphaapollo.models.lora import resolve_target_modules
from alphaapollo.models.sharding import MIN_UNIT, find_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ModelSizes:
    """Parameter counts of a model, and sizes of its KV cache."""

    parameters: int
    root_parameters: int  # outside the layers that FSDP gathers one at a time: embedding, head, norms
    layer_parameters: int  # of the largest such layer; 0 if layers are too small to be gathered one at a time
    num_layers: int
    expert_parameters: int  # of the experts that expert parallelism can split, in all layers
    layer_expert_parameters: int  # of these, in one layer
    head_parameters: int  # of the output projection
    hidden_size: int
    kv_elements_per_token: int  # in the KV cache of the layers that keep the whole sequence
    num_heads: int
    num_kv_heads: int  # over which tensor-parallel ranks divide the cache
    vision_parameters: int = 0  # of the vision tower; they are among root_parameters


def load_on_meta_device(model: Model, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model on the meta device from config.json, to measure its memory. model.attention=auto means padded."""
    loaded = load_without_weights(model, dtype)
    language = find_language_model(loaded)
    if language.config._attn_implementation == register_attn_implementation("padded"):  # not the model's own attention
        backend: Attention = "padded" if model.attention == "auto" else model.attention
        language.set_attn_implementation(register_attn_implementation(backend, partial(_simulate_attention, backend)))
    return loaded


def _simulate_attention(backend: Attention, call: AttentionCall) -> Tensor:
    """Return an attention output on the meta device; autograd saves the same tensors for backward as with `backend`."""
    call.check_supported_by(backend)
    if backend in ("padded", "sdpa") and (call.softcap is not None or call.sinks is not None):
        call = call.repeat_key_value_heads()
        return attend_eager(call, call.query, call.key, call.value, None).transpose(1, 2).contiguous()
    output: Tensor = _SimulatedKernel.apply(call.query, call.key, call.value)
    return output


class _SimulatedKernel(torch.autograd.Function):
    """Stand-in for a fused attention kernel, which saves inputs, output and one float32 per query and head."""

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
    config, layers = model.config.get_text_config(), find_decoder_layers(model)
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    units = [count for count in counts if count >= MIN_UNIT]
    experts = [sum(p.numel() for part in find_experts(layer) for p in part.parameters()) for layer in layers]
    total = sum(parameter.numel() for parameter in model.parameters())
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    of_layer = 2 * kv_heads * get_attention_head_size(config)
    latent = getattr(config, "kv_lora_rank", None)  # multi-head latent attention: one vector for all heads
    kinds = getattr(config, "layer_types", None) or []  # layers with a window or a recurrent state keep no more
    cached_layers = kinds.count("full_attention") or len(layers)
    return ModelSizes(
        parameters=total,
        root_parameters=total - sum(units),
        layer_parameters=max(units, default=0),
        num_layers=len(layers),
        expert_parameters=sum(experts),
        layer_expert_parameters=max(experts, default=0),
        head_parameters=model.get_output_embeddings().weight.numel(),
        hidden_size=config.hidden_size,
        kv_elements_per_token=cached_layers * (latent + config.qk_rope_head_dim if latent else of_layer),
        num_heads=config.num_attention_heads,
        num_kv_heads=1 if latent else kv_heads,
        vision_parameters=sum(p.numel() for part in find_vision_modules(model) for p in part.parameters()),
    )


def estimate_image_bytes(
    config: PretrainedConfig, num_image_tokens: int, dtype_bytes: int, is_trained: bool, has_checkpointing: bool
) -> int:
    """Estimate the memory that images of `num_image_tokens` image tokens need during a training pass: float32 pixels
    and, if the vision tower is trained, what its blocks save for the backward pass. 0 for a text model."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return 0
    size = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    merge = getattr(vision, "spatial_merge_size", 0) or 1 / getattr(config, "downsample_ratio", 1)  # Qwen; InternVL
    patches = int(num_image_tokens * merge**2)
    pixels = patches * 3 * size**2 * getattr(vision, "temporal_patch_size", 1) * torch.float32.itemsize
    if not is_trained:
        return pixels
    depth = getattr(vision, "depth", 0) or vision.num_hidden_layers
    # inputs of two norms and of qkv, q, k and v with rotated q and k, attention and its projection; the MLP's three
    block = vision.hidden_size if has_checkpointing else 9 * vision.hidden_size + 3 * vision.intermediate_size
    return pixels + patches * depth * block * dtype_bytes


def count_adapter_parameters(model: PreTrainedModel, lora: Lora) -> int:
    """Count the parameters of all LoRA adapters: A [rank, in] and B [out, rank] of each adapted layer."""
    targets = set(resolve_target_modules(model, lora))
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in targets]
    return sum(lora.lora_rank * sum(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear))


def measure_layer_bytes(model: PreTrainedModel, num_rows: int, row_length: int) -> int:
    """Measure what the second decoder layer saves for the backward pass of rows of equal length, in bytes."""
    return _measure_saved_bytes(model, num_rows, row_length, 2) - _measure_saved_bytes(model, num_rows, row_length, 1)


def _measure_saved_bytes(model: PreTrainedModel, num_rows: int, row_length: int, num_layers: int) -> int:
    """Run the first layers on the meta device. Returns the bytes saved for the backward pass, without parameters."""
    decoder, first = find_language_model(model.base_model), find_decoder_layers(model)[0]
    lists = {name: module for name, module in decoder.named_children() if isinstance(module, nn.ModuleList)}
    name, layers = next((name, module) for name, module in lists.items() if module[0] is first)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    size, dtype = model.config.get_text_config().hidden_size, next(model.parameters()).dtype
    embeddings = torch.empty(num_rows, row_length, size, dtype=dtype, device="meta").requires_grad_()
    positions = torch.zeros(1, row_length, dtype=torch.long, device="meta")
    setattr(decoder, name, layers[:num_layers])
    with saved_tensors_hooks(keep, lambda tensor: tensor), _GroupedMatmulShapes():
        decoder(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
    setattr(decoder, name, layers)
    return sum(storage.nbytes() for key, storage in saved.items() if key not in own)


class _GroupedMatmulShapes(TorchDispatchMode):
    """Context manager in which grouped products of float32 work on the meta device, whose function knows bfloat16."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        matrices = (torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in args[:2])
        return torch.empty_like(func(*matrices, *args[2:], **(kwargs or {})), dtype=args[0].dtype)
