"""Digest of model weights that does not depend on how the weights are stored.

The trainer and an engine store the same numbers differently: fused (q, k and v in one matrix), sharded over
tensor-parallel ranks, permuted for a kernel, or padded with zeros. The digest is therefore the sum of a hash of each
element, modulo 2**64. The order of elements does not matter, zeros contribute nothing, and the digests of all shards
add up to the digest of the full tensor.

The digest does not detect two swapped elements; the log-prob probe does (weight_sync/verification.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

MODULUS = 1 << 64
_CHUNK = 1 << 18  # elements per call on a CPU; the buffers fit into a core's cache
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687)  # odd, as in splitmix64
_SHIFTS = (32, 29)


def compute_joint_digest(tensors: Iterable[torch.Tensor]) -> int:
    """Compute the digest of floating-point tensors of any shapes, in [0, 2**64): the sum of a hash of each element.

    Elements are hashed as float32, so a bfloat16 tensor and its float32 copy have the same digest. The hash of 0.0 is
    0, the hash of -0.0 is not. Waits for the GPU once.
    """
    return int(sum_hashes(tensors)) % MODULUS


def sum_hashes(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum the hashes of the elements of all tensors, which are on one device. Returns an int64 scalar on this device,
    which is the digest modulo 2**64."""
    sums = [_sum_tensor_hashes(tensor.detach()) for tensor in tensors]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def _sum_tensor_hashes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        from alphaapollo.engines.weight_sync.digest_kernel import sum_hashes_on_gpu

        return sum_hashes_on_gpu(tensor.contiguous(), _MULTIPLIERS, _SHIFTS)
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return _sum_hashes_of_16_bits(tensor)
    sums: list[torch.Tensor] = []
    for part in tensor.reshape(-1).split(_CHUNK):
        words = part.to(torch.float32).view(torch.int32)
        if not sums:  # the first part is the longest
            buffers = torch.empty(2, words.numel(), dtype=torch.int64, device=words.device)
        sums.append(_hash_and_sum_words(words, *buffers[:, : words.numel()]))
    return torch.stack(sums).sum()


def _sum_hashes_of_16_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the hashes of 16-bit elements: count how often each of the 65,536 values occurs. Twice as fast on CPUs."""
    counts = torch.zeros(1 << 16, dtype=torch.int64)
    for part in tensor.reshape(-1).view(torch.uint16).split(_CHUNK):
        counts += torch.bincount(part.to(torch.int32), minlength=1 << 16)  # releases the GIL, unlike numpy's
    return (counts * _hash_all_values(tensor.dtype)).sum()


@cache
def _hash_all_values(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    hashes = torch.empty(2, 1 << 16, dtype=torch.int64)
    _hash_and_sum_words(values.to(torch.float32).view(torch.int32), *hashes)
    return hashes[0]


def select_rank_parts(layer: Any, parameter_name: str, tensor: torch.Tensor, tp_rank: int) -> Iterator[torch.Tensor]:
    """Yield the part of a parameter of an engine's layer that this tensor-parallel rank adds to the digest, so that no
    element counts twice: the rank's shard of a sharded parameter, and a replicated parameter on rank 0 only. The
    layers of vLLM and SGLang have the same names."""
    class_names = {base.__name__ for base in type(layer).__mro__}
    is_sharded = getattr(layer, "tp_size", 1) > 1 and (
        bool(class_names & {"ColumnParallelLinear", "VocabParallelEmbedding"})
        or ("RowParallelLinear" in class_names and parameter_name == "weight")
    )
    if "QKVParallelLinear" in class_names and is_sharded and layer.tp_rank % layer.num_kv_head_replicas:
        yield tensor[: layer.num_heads * layer.head_size]  # another rank counts the replicated key and value heads
    elif is_sharded or class_names & {"RoutedExperts", "FusedMoE"} or tp_rank == 0:
        yield tensor


def format_digest(digest: int) -> str:
    """Format a digest as 16 hexadecimal digits, as in WeightUpdate and WeightReceipt."""
    return f"{digest % MODULUS:016x}"


def _hash_and_sum_words(words: torch.Tensor, hash_buffer: torch.Tensor, high_bits_buffer: torch.Tensor) -> torch.Tensor:
    """Hash each word (int32 [N]) and return the sum of the hashes as an int64 scalar, which wraps around. The hash
    multiplies a word and folds its high bits into the low bits, twice. The buffers (int64 [N]) are overwritten."""
    hash_buffer.copy_(words)
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS, strict=True):
        hash_buffer.mul_(multiplier)
        hash_buffer.bitwise_xor_(torch.bitwise_right_shift(hash_buffer, shift, out=high_bits_buffer))
    return hash_buffer.sum()
