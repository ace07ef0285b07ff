"""Layout-independent digest of model weights.

The trainer and an engine store the same numbers in different layouts: fused (q, k and v in one matrix), sharded over
tensor-parallel ranks, permuted by a kernel's packing, or padded with zeros. The digest is therefore the sum of a hash
of each element, modulo 2**64. It does not depend on the order of elements, and zeros contribute nothing. The digests of
all shards add up to the digest of the full tensor.

The digest does not detect two swapped elements; the log-prob probe does (weight_sync/verification.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

MODULUS = 1 << 64
_CHUNK_CPU = 1 << 15  # elements per hash call; the buffers fit into a core's cache
_CHUNK_ACCELERATOR = 1 << 24
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687)  # odd, as in splitmix64
_SHIFTS = (32, 29)


def tensor_digest(tensor: torch.Tensor) -> int:
    """Compute the digest of one floating-point tensor of any shape, in [0, 2**64). Elements are hashed by their bits as
    float32, so a bfloat16 tensor and its float32 copy have the same digest. 0.0 contributes nothing (-0.0 does)."""
    values = tensor.detach().reshape(-1)
    chunk = _CHUNK_CPU if values.device.type == "cpu" else _CHUNK_ACCELERATOR
    sums: list[torch.Tensor] = []
    for part in values.split(chunk):
        words = part.to(torch.float32).view(torch.int32)
        if not sums:  # the first part is the longest
            buffers = torch.empty(2, words.numel(), dtype=torch.int64, device=words.device)
        sums.append(_hash_sum(words, *buffers[:, : words.numel()]))
    return int(torch.stack(sums).sum()) % MODULUS


def tensors_digest(tensors: Iterable[torch.Tensor]) -> int:
    """Compute the joint digest of several tensors, which is the sum of their digests modulo 2**64."""
    return sum(tensor_digest(tensor) for tensor in tensors) % MODULUS


def format_digest(digest: int) -> str:
    """Format a digest as 16 hexadecimal digits, the format in WeightUpdate and WeightReceipt."""
    return f"{digest % MODULUS:016x}"


def _hash_sum(words: torch.Tensor, bits: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the sum of the hashes of int32 words as an int64 scalar; overflow wraps around. The hash multiplies a word
    and folds its high bits into the low bits, twice; 0 hashes to 0. `bits` and `high` are int64 work buffers with the
    length of `words`."""
    bits.copy_(words)
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS, strict=True):
        bits.mul_(multiplier)
        bits.bitwise_xor_(torch.bitwise_right_shift(bits, shift, out=high))
    return bits.sum()
