"""Measure the activation memory of a training pass by running the model on the meta device, which allocates nothing.

The pass runs with one decoder layer, then with two. The difference is what each layer saves for the backward pass;
all other activation memory is independent of the number of layers.
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
from alphaapollo.models.attention import AttentionCall, attend_eager, register_attn_implementation
from alphaapollo.models.decoder import find_decoder_layers, get_attention_head_size
from alphaapollo.models.expert_parallel import find_experts
from alphaapollo.models.lm_head import CHUNK_LOGITS, DivergenceTarget, LmHead, LmHeadInput, compute_token_stats
from alphaapollo.models.load import load_without_weights
from alphaapollo.models.lora import resolve_target_modules
from alphaapollo.models.moe_routing import ExpertSizes
from alphaapollo.models.policy import read_logit_scale_and_softcap
from alphaapollo.models.sharding import MIN_UNIT
from alphaapollo.models.vision import find_language_model, find_vision_modules

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
    experts_per_token: int
    head_parameters: int  # of the output projection
    hidden_size: int
    kv_elements_per_token: int  # keys and values in all layers
    cached_elements_per_token: int  # of the whole sequence in an engine's KV cache, over all tensor-parallel ranks
    num_heads: int
    num_kv_heads: int  # over which tensor-parallel ranks divide the cache
    vision_parameters: int = 0  # of the vision tower; they are among root_parameters


@dataclass(frozen=True)
class ActivationBytes:
    """Activation memory of one micro-batch on one rank, in bytes."""

    saved: int  # all layers save this for the backward pass
    layer_peak: int  # in addition during the backward pass of one layer, with its gradients
    head_peak: int  # in addition while the output head computes log-probs and gradients, with the head's gradient


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
    moe = ExpertSizes.from_config(model.config)
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
        experts_per_token=moe.experts_per_token if moe else 0,
        head_parameters=model.get_output_embeddings().weight.numel(),
        hidden_size=config.hidden_size,
        kv_elements_per_token=len(layers) * of_layer,
        cached_elements_per_token=cached_layers * (latent + config.qk_rope_head_dim if latent else of_layer),
        num_heads=config.num_attention_heads,
        num_kv_heads=1 if latent else kv_heads,
        vision_parameters=sum(p.numel() for part in find_vision_modules(model) for p in part.parameters()),
    )


def estimate_picture_bytes(
    config: PretrainedConfig, num_image_tokens: int, dtype_bytes: int, is_trained: bool, has_checkpointing: bool
) -> int:
    """Estimate the memory that pictures of `num_image_tokens` image tokens need during a training pass: float32 pixels
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


@dataclass(frozen=True)
class TrainingPass:
    """Forward and backward pass whose memory is measured, over a micro-batch of sequences of equal length."""

    num_sequences: int
    sequence_length: int  # tokens, all of them response tokens
    has_checkpointing: bool
    device: str  # cpu or cuda; determines the chunk size of the head
    has_lm_head: bool = True  # compute log-probs over the vocabulary; false for a critic
    divergence: Divergence | None = None  # also compute this divergence from a frozen model
    has_adapters: bool = False  # LoRA: base weights and head get no gradient; layers save the same bytes
    ep_size: int = 1  # number of ranks that split the experts; each is assumed to get the same number of tokens


def measure_activation_bytes(model: PreTrainedModel, training: TrainingPass) -> ActivationBytes:
    """Measure the activation memory of a training pass. `model` is on the meta device (load_on_meta_device)."""
    count, length = training.num_sequences, training.sequence_length
    (first, peak), (second, _) = (_measure_decoder_bytes(model, count, length, num_layers) for num_layers in (1, 2))
    layer, width = second - first, next(model.parameters()).element_size()
    hidden = count * length * model.config.get_text_config().hidden_size * width
    head = _measure_lm_head_peak_bytes(model, training) if training.has_lm_head else 0
    sizes = read_model_sizes(model)
    if training.has_adapters:
        peak -= width * sizes.layer_parameters
    if training.ep_size > 1:  # copies of hidden states and outputs are sent for each chosen expert
        peak += 2 * hidden * sizes.experts_per_token
        if not training.has_adapters:  # gradients of the other ranks' experts
            peak -= width * sizes.layer_expert_parameters * (training.ep_size - 1) // training.ep_size
    depth = len(find_decoder_layers(model))
    if training.has_checkpointing:  # a layer saves its input and is recomputed in the backward pass
        return ActivationBytes(saved=depth * hidden, layer_peak=peak, head_peak=head)
    return ActivationBytes(saved=depth * layer, layer_peak=peak - layer, head_peak=head)


def measure_inference_bytes(model: PreTrainedModel, num_tokens: int) -> int:
    """Measure the peak memory of a forward pass over one sequence without gradients, up to the hidden states."""
    with torch.no_grad():
        return _measure_decoder_bytes(model, 1, num_tokens, 1)[1]


def _measure_decoder_bytes(
    model: PreTrainedModel, num_sequences: int, num_tokens: int, num_layers: int
) -> tuple[int, int]:
    """Run sequences of `num_tokens` tokens through the first layers, with a backward pass if gradients are enabled.
    Returns the bytes saved for the backward pass, and the peak bytes."""
    decoder, first = find_language_model(model.base_model), find_decoder_layers(model)[0]
    lists = {name: module for name, module in decoder.named_children() if isinstance(module, nn.ModuleList)}
    name, layers = next((name, module) for name, module in lists.items() if module[0] is first)
    setattr(decoder, name, layers[:num_layers])
    positions = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    size, dtype = model.config.get_text_config().hidden_size, next(model.parameters()).dtype
    with LiveByteCounter(model) as live:
        embeddings = torch.empty(num_sequences, num_tokens, size, dtype=dtype, device="meta").requires_grad_()
        total = decoder(inputs_embeds=embeddings, position_ids=positions, use_cache=False)[0].sum()
        saved = live.now
        if torch.is_grad_enabled():
            total.backward()
    setattr(decoder, name, layers)
    model.zero_grad()
    return saved, live.peak


def _measure_lm_head_peak_bytes(model: PreTrainedModel, training: TrainingPass) -> int:
    num_tokens = training.num_sequences * training.sequence_length
    output = model.get_output_embeddings().requires_grad_(not training.has_adapters)
    head = LmHead(output.weight, output.bias, *read_logit_scale_and_softcap(model.config))
    with LiveByteCounter(model) as live:
        size, dtype = output.weight.shape[1], output.weight.dtype
        hidden = LmHeadInput(torch.empty(num_tokens, size, dtype=dtype, device="meta").requires_grad_(), head)
        targets = torch.empty(num_tokens, dtype=torch.long, device="meta")
        frozen_model = None
        if training.divergence is not None:
            states = torch.empty(num_tokens, size, dtype=dtype, device="meta")
            frozen_model = DivergenceTarget(LmHeadInput(states, head), training.divergence)
        stats = compute_token_stats(hidden, targets, 1.0, True, frozen_model, CHUNK_LOGITS[training.device])
        total = stats.logprobs.sum()
        (total if stats.divergence is None else total + stats.divergence.sum()).backward()
    model.zero_grad()
    output.requires_grad_(True)
    return live.peak


class LiveByteCounter(TorchDispatchMode):
    """Context manager that counts the bytes of tensors that operations create and that are still in use. Parameters and
    buffers of `model` do not count."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default:  # its shape function supports bfloat16 only
            matrices = (torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in args[:2])
            result = torch.empty_like(func(*matrices, *args[2:], **kwargs), dtype=args[0].dtype)
        else:
            result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count_storage(leaf.untyped_storage())
        return result

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._forget_storage(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget_storage(self, storage_id: int, num_bytes: int) -> None:
        if self._alive.pop(storage_id, None) is not None:
            self.now -= num_bytes
