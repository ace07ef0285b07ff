"""GPU kernel of the digest: reads each element once and writes nothing but the sum (digest.py has the same hash)."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

BLOCK = 4096  # elements per program


def sum_hashes_on_gpu(values: torch.Tensor, multipliers: tuple[int, int], shifts: tuple[int, int]) -> torch.Tensor:
    """Sum the hashes of all elements (contiguous, any shape). Returns an int64 scalar on the device."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    if values.numel():
        _add_hashes[(triton.cdiv(values.numel(), BLOCK),)](values, total, values.numel(), *multipliers, *shifts, BLOCK)
    return total


@triton.jit
def _add_hashes(  # type: ignore[no-untyped-def]
    values,
    total,
    length,
    first_multiplier: tl.constexpr,
    second_multiplier: tl.constexpr,
    first_shift: tl.constexpr,
    second_shift: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(values + offsets, mask=offsets < length, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    hashes = words.to(tl.int64) * first_multiplier
    hashes ^= hashes >> first_shift
    hashes *= second_multiplier
    hashes ^= hashes >> second_shift
    tl.atomic_add(total, tl.sum(hashes))  # integers: the order does not matter
