"""Estimate the memory of an engine: weights, activations, and the KV cache of a token."""

from __future__ import annotations

from alphaapollo.config.resolve import get_resolved
from alphaapollo.config.schema import Config
from alphaapollo.config.schema.base import Device
from alphaapollo.planning.model_memory import FLOAT32, Usage, estimate_layer_bytes, get_dtype_bytes, load_model_sizes


def estimate_engine(config: Config, device: Device) -> Usage:
    """Estimate an engine's memory, without KV cache and CUDA context."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.name == "fake":
        return Usage()
    sizes, parallel = load_model_sizes(model), rollout.tensor_model_parallel_size
    weights = Usage({"engine weights": sizes.count_bytes(get_dtype_bytes(rollout.dtype)) // parallel})
    # in a step: activations, float32 logits, and a copy of the logits to sample from
    activations = 2 * estimate_layer_bytes(model, 1, max(rollout.max_num_batched_tokens, config.data.max_length)) // 3
    logits = 2 * FLOAT32 * get_resolved(rollout.max_num_seqs) * (sizes.head_parameters // sizes.hidden_size)
    return weights + Usage({"engine buffers": activations // parallel + logits if device == "cuda" else 0})


def count_kv_token_bytes(config: Config) -> int:
    """Return the bytes of a token in the KV cache of a tensor-parallel rank. Layers with a window are not counted."""
    rollout, sizes = config.actor_rollout_ref.rollout, load_model_sizes(config.actor_rollout_ref.model)
    size = sizes.kv_elements_per_token * get_dtype_bytes(rollout.dtype)
    return size // min(rollout.tensor_model_parallel_size, sizes.num_kv_heads)
