"""Estimate the memory of a model on a training rank from the model's sizes.

The estimate follows the FSDP2 settings of models/sharding.py. Parameters are float32 shards. One layer is gathered at a
time (with expert parallelism, a part of its experts) and the next one is prefetched. The root (embedding, head, norms)
is gathered from the forward pass to the end of the backward pass. Gradients are reduced in float32.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import Model
from alphaapollo.config.schema.base import Device
from alphaapollo.config.schema.model import FrozenFsdp, Fsdp, PolicyOptimizerName
from alphaapollo.engines.weight_sync.buckets import BUCKET_BYTES
from alphaapollo.models.attention import find_unsupported_features
from alphaapollo.models.cpu_attention import MAX_KEYS
from alphaapollo.models.decoder import find_decoder_layers, find_vision_modules, get_attention_head_size
from alphaapollo.models.expert_parallel import find_experts
from alphaapollo.models.flops import FlopsEstimator
from alphaapollo.models.lm_head import LOGIT_LIMITS
from alphaapollo.models.load import load_config, load_without_weights
from alphaapollo.models.lora import resolve_target_modules
from alphaapollo.models.moe_routing import ExpertSizes
from alphaapollo.models.quantized import find_quantized_layers, find_unsupported_quantization, read_group_size
from alphaapollo.models.sharding import MIN_UNIT
from alphaapollo.models.weight_files import find_weight_files

GIB = 2**30
FLOAT32 = 4
STATE_BYTES = {"adamw": 2 * FLOAT32, "adamw_8bit": 2 * (1 + FLOAT32 / 256), "muon": FLOAT32, "trpo": 5 * FLOAT32}
"""Bytes per parameter of the optimizer. TRPO keeps no state, but has the old weights and four vectors during a step."""
LOGIT_COPIES, DIVERGENCE_COPIES = 4, 6  # float32 copies of a chunk of logits, without and with a frozen model's logits
SCORE_BYTES = 10  # bytes that attention saves per head and pair of tokens if it is not fused
DEVICE_INPUTS = 3  # inputs of layers that are on the device in spite of activation_offload

Usage = Counter[str]
"""Kind of memory -> bytes."""


@dataclass(frozen=True)
class ModelSizes:
    """Parameter counts of a model, what a layer saves, and sizes of the KV cache."""

    parameters: int
    root_parameters: int  # outside the layers that FSDP gathers one at a time: embedding, head, norms
    layer_parameters: int  # of the largest layer that is gathered alone; 0 if all layers are too small for it
    num_layers: int
    saved_per_token: int  # numbers that a layer saves per token for its backward pass, not counting its norms
    norms_per_token: int  # numbers per token in float32 of a layer's norms, besides one norm of hidden_size
    expert_parameters: int  # of the experts that expert parallelism can split, in all layers
    layer_expert_parameters: int  # of such experts, in one layer
    head_parameters: int  # of the output projection
    hidden_size: int
    kv_elements_per_token: int  # in the KV cache of the layers that attend to the complete sequence
    num_heads: int
    num_kv_heads: int  # over which tensor-parallel ranks divide the cache
    products_per_token: int = 0  # numbers that a layer keeps of its products with selective checkpointing
    attention_per_token: int = 0  # outputs of a layer's attention
    vision_parameters: int = 0  # of the vision tower; they are among root_parameters
    flops: FlopsEstimator | None = None  # of full training; None: the number of experts is unknown
    quantized_parameters: int = 0  # of frozen layers with weights of 4 bits
    group_size: int = 1  # weights of 4 bits that share a scale
    needs_flash: bool = False  # only the flash kernel fuses the attention, e.g. because of a soft cap

    def count_bytes(self, width: int) -> int:
        """Return the bytes of all weights. width: bytes of a number, except for weights of 4 bits."""
        codes_and_scales = self.quantized_parameters // 2 + width * (self.quantized_parameters // self.group_size)
        return width * (self.parameters - self.quantized_parameters) + codes_and_scales

    def count_gathered_layer(self, ep_size: int) -> int:
        """Return the parameters of the largest layer after FSDP has gathered it on a rank."""
        return self.layer_parameters - self.layer_expert_parameters + self.layer_expert_parameters // ep_size


def load_model_sizes(model: Model) -> ModelSizes:
    """Read the sizes from config.json and the modules of the model, without weights."""
    return _load_model_sizes(model.path, model.trust_remote_code)


@lru_cache(maxsize=16)
def _load_model_sizes(path: str, trust_remote_code: bool) -> ModelSizes:
    model = load_without_weights(Model(path=path, trust_remote_code=trust_remote_code))
    config, layers = model.config.get_text_config(), find_decoder_layers(model)
    counts = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    gathered_counts = [count for count in counts if count >= MIN_UNIT]
    experts = [[parameter for part in find_experts(layer) for parameter in part.parameters()] for layer in layers]
    expert_counts = [sum(parameter.numel() for parameter in parameters) for parameters in experts]
    total = sum(parameter.numel() for parameter in model.parameters())
    original = load_config(Model(path=path, trust_remote_code=trust_remote_code))
    group_size = 0 if find_unsupported_quantization(original) else read_group_size(original, path)
    quantized = _list_quantized_layers(model, path) if group_size else []
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # Linear layers save their inputs, and the operations after them save their outputs.
    experts_per_token = getattr(ExpertSizes.from_config(model.config), "experts_per_token", 0)
    outputs = [sum(part.out_features for part in layer.modules() if isinstance(part, nn.Linear)) for layer in layers]
    expert_outputs = [sum(matrix.shape[1] for matrix in matrices if matrix.ndim == 3) for matrices in experts]
    layer_outputs = [dense + experts_per_token * expert for dense, expert in zip(outputs, expert_outputs, strict=True)]
    least = config.hidden_size / 2  # inputs of products whose results are kept (models/recompute.py)
    linear = [part for part in layers[-1].modules() if isinstance(part, nn.Linear) and part.in_features >= least]
    kept_experts = [part.shape[1] for part in experts[-1] if part.ndim == 3 and part.shape[2] >= least]
    scales = [getattr(part, "weight", None) for part in layers[-1].modules() if "Norm" in type(part).__name__]
    norms = [len(scale) for scale in scales if isinstance(scale, Tensor)]
    head_size, qk_heads = get_attention_head_size(config), config.num_attention_heads + kv_heads
    # Attention saves the outputs of norms of queries and keys, which have one norm per head.
    norm_numbers = sum(size * qk_heads * 3 // 8 if size == head_size else size for size in norms)
    latent_size = getattr(config, "kv_lora_rank", None)  # multi-head latent attention: one vector for all heads
    kv_elements = latent_size + config.qk_rope_head_dim if latent_size else 2 * kv_heads * head_size
    layer_types = getattr(config, "layer_types", None) or []  # not full_attention: a window or a recurrent state
    return ModelSizes(
        parameters=total,
        root_parameters=total - sum(gathered_counts),
        layer_parameters=max(gathered_counts, default=0),
        num_layers=len(layers),
        saved_per_token=2 * max(layer_outputs),  # inputs are about as large as outputs
        norms_per_token=max(norm_numbers, config.hidden_size) - config.hidden_size,
        expert_parameters=sum(expert_counts),
        layer_expert_parameters=max(expert_counts),
        head_parameters=model.get_output_embeddings().weight.numel(),
        hidden_size=config.hidden_size,
        kv_elements_per_token=(layer_types.count("full_attention") or len(layers)) * kv_elements,
        num_heads=config.num_attention_heads,
        num_kv_heads=1 if latent_size else kv_heads,
        products_per_token=sum(part.out_features for part in linear) + experts_per_token * sum(kept_experts),
        attention_per_token=config.num_attention_heads * (getattr(config, "v_head_dim", None) or head_size),
        vision_parameters=sum(weight.numel() for part in find_vision_modules(model) for weight in part.parameters()),
        flops=FlopsEstimator.from_model(model),
        quantized_parameters=sum(model.get_parameter(f"{name}.weight").numel() for name in quantized),
        group_size=group_size or 1,
        needs_flash=bool(find_unsupported_features(config, "varlen")),
    )


def _list_quantized_layers(model: Any, path: str) -> list[str]:
    """Return the names of the layers with weights of 4 bits: those in the model's files. Without files: all linear
    layers before the output head."""
    if find_weight_files(path):
        return [name for names in find_quantized_layers(path).values() for name in names]
    head, modules = model.get_output_embeddings(), model.named_modules()
    return [name for name, part in modules if isinstance(part, nn.Linear) and part is not head]


def estimate_layer_bytes(model: Model, num_rows: int, row_length: int) -> int:
    """Estimate what a layer saves for the backward pass of rows of equal length."""
    sizes = load_model_sizes(model)
    scores = _count_score_bytes(model, row_length) * sizes.num_heads * row_length
    norms = 2 * FLOAT32 * sizes.norms_per_token
    return num_rows * row_length * (get_dtype_bytes(model.dtype) * sizes.saved_per_token + norms + scores)


def _count_score_bytes(model: Model, row_length: int) -> int:
    """Return the bytes that attention saves per head and pair of tokens; 0 if it is fused."""
    kernel = get_attention_kernel(model)
    if kernel != "flash" and load_model_sizes(model).needs_flash:
        return SCORE_BYTES
    # probabilities (models/cpu_attention.py)
    return get_dtype_bytes(model.dtype) if kernel == "padded" and row_length <= MAX_KEYS else 0


@dataclass(frozen=True)
class Activations:
    """Bytes that the layers of a model save for the backward pass of a micro-batch."""

    saved: int  # on the device
    recomputed: int = 0  # further ones while a layer is recomputed
    offloaded: int = 0  # in host memory


def estimate_activations(model: Model, num_rows: int, row_length: int, device: Device) -> Activations:
    """Estimate what all layers save for the backward pass of rows of equal length (models/recompute.py)."""
    sizes, width, num_recomputed = load_model_sizes(model), get_dtype_bytes(model.dtype), count_recomputed_layers(model)
    layer = estimate_layer_bytes(model, num_rows, row_length)
    if not num_recomputed:
        return Activations(sizes.num_layers * layer)
    one_input, kept = width * num_rows * row_length * sizes.hidden_size, 0
    if model.keeps_products:
        is_fused = not _count_score_bytes(model, row_length)
        attention = (width * sizes.attention_per_token + FLOAT32 * sizes.num_heads) * is_fused
        kept = num_rows * row_length * (width * sizes.products_per_token + attention)
    inputs, offloaded = num_recomputed * one_input, 0
    if model.activation_offload and device == "cuda":
        buffer = 1 << (one_input - 1).bit_length()
        inputs, offloaded = min(num_recomputed, DEVICE_INPUTS) * one_input, (num_recomputed - 1) * buffer
    saved = (sizes.num_layers - num_recomputed) * layer + num_recomputed * kept + inputs
    return Activations(saved, max(0, layer - kept), offloaded)


def count_recomputed_layers(model: Model) -> int:
    """Return the number of decoder layers that are recomputed in the backward pass."""
    interval = model.recompute_interval
    return load_model_sizes(model).num_layers // interval if interval else 0


def estimate_image_bytes(model: Model, num_image_tokens: int) -> int:
    """Estimate what the blocks of a trained vision tower save for the backward pass of `num_image_tokens` image tokens.
    0 for a frozen tower, whose pixels take little, and for a text model."""
    vision = getattr(load_config(model), "vision_config", None)
    if vision is None or model.freeze_vision or model.lora_rank:
        return 0
    ratio = getattr(load_config(model), "downsample_ratio", 1)  # InternVL; other towers merge patches
    patches = int(num_image_tokens * (getattr(vision, "spatial_merge_size", 0) or 1 / ratio) ** 2)
    depth = getattr(vision, "depth", 0) or vision.num_hidden_layers
    # Inputs of two norms, of qkv and of the projection; q, k, v, rotated q and k; three activations of the MLP.
    block = 9 * vision.hidden_size + 3 * vision.intermediate_size
    kept = vision.hidden_size + (block // 2 if model.keeps_products else 0)  # of a recomputed block
    num_recomputed = int(depth) // model.recompute_interval if model.recompute_interval else 0
    numbers = int(int(depth) * block - num_recomputed * (block - kept))
    return patches * numbers * get_dtype_bytes(model.dtype)


def count_adapter_parameters(model: Model) -> int:
    """Count the parameters of all LoRA adapters: A [rank, in] and B [out, rank] of each adapted layer."""
    targets = model.target_modules if isinstance(model.target_modules, str) else tuple(model.target_modules)
    return model.lora_rank and model.lora_rank * _count_adapted_sides(model.path, model.trust_remote_code, targets)


@lru_cache(maxsize=16)
def _count_adapted_sides(path: str, trust_remote_code: bool, targets: str | tuple[str, ...]) -> int:
    model = Model.model_validate({"path": path, "trust_remote_code": trust_remote_code, "target_modules": targets})
    loaded = load_without_weights(model)
    names = set(resolve_target_modules(loaded, model))
    layers = [module for name, module in loaded.named_modules() if name.rpartition(".")[2] in names]
    return sum(sum(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear))


@dataclass(frozen=True)
class RankModel:
    """A model on a training rank: its sizes, and the settings that determine its memory."""

    sizes: ModelSizes
    fsdp: Fsdp | FrozenFsdp
    shards: int  # number of ranks that share one copy of the weights
    dtype_bytes: int  # bytes per element in forward and backward passes
    state: Usage  # this rank's shards of weights and optimizer state, on the device or in host memory
    trained: int = 0  # parameters with gradients, of all shards; 0: a frozen model
    adapts: bool = False  # only LoRA adapters are trained
    saved_bytes: int = 0  # activations that all layers save for the backward pass
    layer_bytes: int = 0  # further activations while a layer computes
    offloaded_bytes: int = 0  # activations in host memory
    head_bytes: int = 0  # logits of a chunk with their gradients
    steps_per_update: int = 2
    device: Device = "cuda"

    @property
    def traffic_bytes(self) -> int:
        """Bytes that a rank receives per micro-batch: the other ranks' weights twice, and float32 gradients."""
        assert isinstance(self.fsdp, Fsdp)
        others_share, experts = (self.shards - 1) / self.shards, self.sizes.expert_parameters
        gathered_share = 1 - experts * (1 - 1 / self.fsdp.ep_size) / self.sizes.parameters
        gradients = FLOAT32 * self.trained * (self.fsdp.sync_each_micro_batch and not self.adapts)
        weights = 2 * self.sizes.count_bytes(self.dtype_bytes)
        return int((weights + gradients) * gathered_share * others_share)

    def offloads(self, key: str) -> bool:
        """Return whether an offload key of fsdp_config is set. On a CPU, it has no effect."""
        return self.device == "cuda" and getattr(self.fsdp, key, False)


def make_frozen_model(
    model: Model, fsdp: Fsdp | FrozenFsdp, device: Device, shards: int, num_tokens: int, dtype: str = ""
) -> RankModel:
    """Describe a model without gradients on a rank. dtype: of its weights; "": the model's."""
    sizes, width = load_model_sizes(model), get_dtype_bytes(model.dtype)
    state = Usage({"frozen models": -(-sizes.count_bytes(get_dtype_bytes(dtype or model.dtype)) // shards)})
    activations = 2 * estimate_layer_bytes(model, 1, num_tokens) // 3
    return RankModel(sizes, fsdp, shards, width, state, layer_bytes=activations, device=device)


def make_rank_model(
    model: Model,
    fsdp: Fsdp,
    device: Device,
    num_ranks: int,
    micro_batch_shape: tuple[int, int],
    optimizer: PolicyOptimizerName = "adamw",
    steps_per_update: int = 2,
    logit_copies: int = LOGIT_COPIES,
    image_tokens_per_row: int = 0,
) -> RankModel:
    """Describe a trained model on a rank.

    micro_batch_shape: (rows, tokens per row) on one rank. logit_copies: copies of a chunk of logits; 0: the model
    computes one number per token or row. image_tokens_per_row: the most image tokens of a row.
    """
    (rows, length), sizes, width = micro_batch_shape, load_model_sizes(model), get_dtype_bytes(model.dtype)
    adapters, shards = count_adapter_parameters(model), fsdp.count_shards(num_ranks)
    frozen = sizes.parameters if adapters else sizes.vision_parameters * model.freeze_vision
    trained = adapters or sizes.parameters - frozen
    shard = -(-trained // shards)
    frozen_bytes = sizes.count_bytes(width) if adapters else FLOAT32 * frozen
    weights = FLOAT32 * shard + -(-frozen_bytes // shards)
    layer = estimate_layer_bytes(model, rows, length)
    activations = estimate_activations(model, rows, length, device)
    logits = rows * length * (sizes.head_parameters // sizes.hidden_size)
    block, chunk = (min(limit, logits) for limit in LOGIT_LIMITS[device])
    logit_bytes = FLOAT32 * logit_copies * chunk
    if logit_copies and device == "cpu":  # on a GPU, a block is a chunk, and one of the copies
        logit_bytes += width * block
    head_gradients = (FLOAT32 + width) * sizes.head_parameters if logit_copies and not adapters else 0
    layer_gradients = 0 if adapters else width * sizes.count_gathered_layer(fsdp.ep_size)
    return RankModel(
        sizes,
        fsdp,
        shards,
        width,
        state=Usage({"weights": weights, "optimizer": math.ceil(STATE_BYTES[optimizer] * shard)}),
        trained=trained,
        adapts=bool(adapters),
        saved_bytes=activations.saved + estimate_image_bytes(model, rows * min(length, image_tokens_per_row)),
        layer_bytes=activations.recomputed + layer // 3 + layer_gradients,
        offloaded_bytes=activations.offloaded,
        head_bytes=logit_bytes + head_gradients,
        steps_per_update=steps_per_update,
        device=device,
    )


def estimate_idle(model: RankModel) -> Usage:
    """Estimate the memory of a model while another model uses the device."""
    keys = {kind: "optimizer_offload" if kind == "optimizer" else "param_offload" for kind in model.state}
    stays = {kind: size for kind, size in model.state.items() if not model.offloads(keys[kind])}
    return Usage() if model.offloads("offload_policy") else Usage(stays)


def estimate_pass(model: RankModel) -> Usage:
    """Estimate the memory of a frozen model while it computes: two layers, and the activations of one of them."""
    layers = model.dtype_bytes * (model.sizes.root_parameters + 2 * model.sizes.layer_parameters)
    weights = Usage() if model.offloads("offload_policy") else model.state
    return weights + Usage({"gathered layers": layers, "activations": model.layer_bytes})


def estimate_update(model: RankModel) -> Usage:
    """Estimate the memory of an update at its peak: in the head, in a layer, in the reduction of the root's gradients
    or in the optimizer step."""
    sizes, width, fsdp, reduction = model.sizes, model.dtype_bytes, model.fsdp, (0 if model.adapts else FLOAT32)
    assert isinstance(fsdp, Fsdp)
    root, layer = sizes.root_parameters, sizes.count_gathered_layer(fsdp.ep_size)
    gradients = FLOAT32 * -(-model.trained // model.shards)
    step = Usage() if model.offloads("offload_policy") else Usage({**model.state, "gradients": gradients})
    passes = Usage(step)
    if model.offloads("optimizer_offload") and model.steps_per_update == 1:
        del passes["optimizer"]
    if reduction and not fsdp.sync_each_micro_batch:  # float32 gradients stay unsharded until the optimizer step
        experts = sizes.expert_parameters  # a rank has the gradients of its part of the experts
        passes["gradients"] += FLOAT32 * (model.trained - experts + experts // fsdp.ep_size)
        reduction = 0
    trained_root = 0 if model.adapts else root - (sizes.parameters - model.trained)
    in_head = {"gathered layers": width * root, "activations": model.saved_bytes, "logits": model.head_bytes}
    in_layer = {
        # this layer, the prefetched layer, and the gradients of the last layer
        "gathered layers": width * (root + 2 * layer) + reduction * layer,
        "activations": model.saved_bytes + model.layer_bytes,
        "logits": 0 if model.adapts else width * sizes.head_parameters,  # until the embedding has its gradient
    }
    reduced = trained_root + trained_root // model.shards
    at_end = {"gathered layers": width * (root + trained_root) + reduction * reduced}
    return max((passes + Usage(in_head), passes + Usage(in_layer), passes + Usage(at_end), step), key=Usage.total)


def count_bucket_bytes(sizes: ModelSizes, width: int) -> int:
    """Return the most bytes of a bucket of a weight sync: less than BUCKET_BYTES, and the last parameter, with which it
    reaches BUCKET_BYTES. width: bytes per number."""
    return min(width * sizes.parameters, BUCKET_BYTES + width * sizes.head_parameters)


def count_sent_bytes(sizes: ModelSizes, width: int) -> int:
    """Return the bytes of a rank's buffers in a weight sync: a bucket, its packed copy, the next bucket, the layer from
    which the next bucket is gathered, and the experts that are split from this layer."""
    layer = max(sizes.layer_parameters + sizes.layer_expert_parameters, sizes.root_parameters)
    return 3 * count_bucket_bytes(sizes, width) + width * layer


def get_dtype_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else FLOAT32
