"""Digest of the weights and adapters that a vLLM worker computes with, for comparison with the trainer's."""

from __future__ import annotations

from collections import Counter

import torch

from alphaapollo.engines.weight_sync.digest import MODULUS, compute_joint_digest, select_rank_parts, sum_hashes


def compute_model_digest(model: torch.nn.Module, unpacked_digest_attribute: str) -> int:
    """Compute this tensor-parallel rank's part of the digest of the weights that a vLLM model computes with.

    unpacked_digest_attribute: layer attribute with a future of the weight's digest, computed before vLLM packed the
    weight. If the layer's own weight (e.g. of tied embeddings) has another digest, the result changes."""
    from vllm.distributed import get_tensor_model_parallel_rank

    tp_rank = get_tensor_model_parallel_rank()
    packing_change = 0  # sum of (digest of the packed weight - digest of the layer's own weight)
    hash_sums: dict[int, torch.Tensor] = {}  # by parameter id, because layers may share a parameter
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) not in hash_sums:
                parts = select_rank_parts(layer, name, parameter, tp_rank)
                hash_sums[id(parameter)] = sum_hashes(parts if parameter.numel() else ()).to(parameter.device)
            if name == "weight" and hasattr(layer, unpacked_digest_attribute):
                packing_change += getattr(layer, unpacked_digest_attribute).result() - int(hash_sums[id(parameter)])
    return (packing_change + int(torch.stack([*hash_sums.values()]).sum())) % MODULUS


def compute_adapter_digest(model: torch.nn.Module, slot: int, base_digest_attribute: str) -> int:
    """Compute the digest of the LoRA adapter in a slot of a vLLM model without tensor parallelism, and of the quantized
    weights below it. The padding of the slot is zero and does not change the digest.

    base_digest_attribute: layer attribute with the digest of quantized weights before vLLM packed them."""
    total = 0
    for layer in model.modules():
        total += vars(layer).get(base_digest_attribute, 0)  # not that of the layer that a LoRA layer wraps
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(layer, name, ())
            parts = (stacked,) if isinstance(stacked, torch.Tensor) else stacked
            total += compute_joint_digest(part[slot] for part in parts)
    return total % MODULUS


def find_tied_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that share their weight with another layer, e.g. the output head with the embedding."""
    layers = [layer for layer in model.modules() if isinstance(layer._parameters.get("weight"), torch.Tensor)]
    num_layers_by_weight = Counter(id(layer.weight) for layer in layers)
    return [layer for layer in layers if num_layers_by_weight[id(layer.weight)] > 1]
