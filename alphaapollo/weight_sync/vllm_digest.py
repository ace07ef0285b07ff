"""Digest of the weights and adapters that a vLLM worker computes with; verification.py compares it with the
trainer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from alphaapollo.weight_sync.digest import MODULUS, tensors_digest


def select_owned_parts(layer: Any, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the parts of a parameter that this tensor-parallel rank counts: its shard, or, for a replicated parameter,
    all of it on rank 0 and nothing on the others."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    sharded = getattr(layer, "tp_size", 1) > 1 and (
        isinstance(layer, ColumnParallelLinear | VocabParallelEmbedding)
        or (isinstance(layer, RowParallelLinear) and name == "weight")
    )
    if isinstance(layer, QKVParallelLinear) and sharded and layer.tp_rank % layer.num_kv_head_replicas:
        yield tensor[: layer.num_heads * layer.head_size]  # another rank counts the replicated key and value heads
    elif sharded or isinstance(layer, RoutedExperts) or get_tensor_model_parallel_rank() == 0:
        yield tensor


def compute_loaded_digest(model: torch.nn.Module, packed: str) -> int:
    """Compute the digest of the weights that `model` computes with, as far as this rank counts them.

    A packed layer contributes the digest taken when it was packed (a future in its attribute `packed`). If it also kept
    its weight (an output head tied to the embedding), any difference between the two changes the sum.
    """
    total = 0
    live: dict[int, int] = {}  # by parameter: layers may share it
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) not in live:
                live[id(parameter)] = (
                    tensors_digest(select_owned_parts(layer, name, parameter)) if parameter.numel() else 0
                )
                total += live[id(parameter)]
            if name == "weight" and hasattr(layer, packed):
                total += getattr(layer, packed).result() - live[id(parameter)]
    return total % MODULUS


def compute_adapter_digest(model: torch.nn.Module) -> int:
    """Compute the digest of the LoRA adapters of a single-rank engine. Empty slots are zero and contribute nothing."""
    total = 0
    for layer in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(layer, name, ())
            total += tensors_digest((stacked,) if isinstance(stacked, torch.Tensor) else stacked)
    return total % MODULUS


def find_tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers that share their weight with another layer."""
    layers = [layer for layer in model.modules() if isinstance(layer._parameters.get("weight"), torch.Tensor)]
    shares = Counter(id(layer.weight) for layer in layers)
    return [layer for layer in layers if shares[id(layer.weight)] > 1]
