"""The digest of what a vLLM worker holds: which part of each parameter this tensor-parallel rank counts, and that of an
adapter. proof.py compares it with the trainer's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from alphaapollo.weight_sync.digest import MODULUS, tensors_digest


def owned_parts(layer: Any, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of a layer's parameter that this rank counts: its own shard, or, of what several ranks hold alike,
    everything on the first of them and nothing on the others."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    sharded = getattr(layer, "tp_size", 1) > 1 and (
        isinstance(layer, ColumnParallelLinear | VocabParallelEmbedding)
        or (isinstance(layer, RowParallelLinear) and name == "weight")
    )
    if isinstance(layer, QKVParallelLinear) and sharded and layer.tp_rank % layer.num_kv_head_replicas:
        yield tensor[: layer.num_heads * layer.head_size]  # the key and value heads are another rank's
    elif sharded or isinstance(layer, RoutedExperts) or get_tensor_model_parallel_rank() == 0:
        yield tensor


def held_digest(model: torch.nn.Module, packed: str) -> int:
    """The digest of the weights that `model` computes with, as far as this rank counts them.

    A packed layer counts with the digest taken when it was packed (a future, its attribute `packed`). One that kept
    its weight beside the packed form (an output head tied to the embedding) must have packed that very weight: any
    difference between the two enters the sum.
    """
    total = 0
    live: dict[int, int] = {}  # by parameter: layers may share one
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) not in live:
                live[id(parameter)] = tensors_digest(owned_parts(layer, name, parameter)) if parameter.numel() else 0
                total += live[id(parameter)]
            if name == "weight" and hasattr(layer, packed):
                total += getattr(layer, packed).result() - live[id(parameter)]
    return total % MODULUS


def adapter_digest(model: torch.nn.Module) -> int:
    """The digest of the adapters that an engine of one rank computes with: of the slots that vLLM fills, where what no
    adapter has is zero and counts nothing."""
    total = 0
    for layer in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(layer, name, ())
            total += tensors_digest((stacked,) if isinstance(stacked, torch.Tensor) else stacked)
    return total % MODULUS


def tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers whose weight is another layer's, too."""
    layers = [layer for layer in model.modules() if isinstance(layer._parameters.get("weight"), torch.Tensor)]
    shares = Counter(id(layer.weight) for layer in layers)
    return [layer for layer in layers if shares[id(layer.weight)] > 1]
