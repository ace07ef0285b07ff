"""Stand-in for `sgl_kernel`, the package of SGLang's CUDA kernels, on a CPU: the hash of seeded sampling.

SGLang's layers use torch without this package. It only looks up some of its names, and every other kernel raises an
error when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

MASK = 0xFFFFFFFF  # of 32 bits


def hash_murmur3(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash each (seed, position, column) to 32 bits with MurmurHash3. seeds: 64-bit integers [N]; positions: [N];
    columns: [V]. Returns int64 [N, V]."""
    seeds = seeds.view(torch.int64) if seeds.dtype == torch.uint64 else seeds.to(torch.int64)
    hashes = _mix_word(_mix_word(torch.zeros_like(seeds), seeds & MASK), (seeds >> 32) & MASK)
    hashes = _mix_word(hashes, positions.to(torch.int64) & MASK)[:, None]
    hashes = _mix_word(hashes, columns.to(torch.int64)[None]) ^ 16  # the length in bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashes = ((hashes ^ (hashes >> shift)) * factor) & MASK
    return hashes ^ (hashes >> 16)


def _mix_word(hashes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    words = (words * 0xCC9E2D51) & MASK
    words = ((words << 15) | (words >> 17)) & MASK
    hashes = hashes ^ ((words * 0x1B873593) & MASK)
    hashes = ((hashes << 13) | (hashes >> 19)) & MASK
    return (hashes * 5 + 0xE6546B64) & MASK


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def raise_missing_kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no implementation for a CPU")

    return raise_missing_kernel


def register_operators() -> torch.library.Library:
    """Register the hash as torch operator, as `sgl_kernel` does. It exists as long as the returned library."""
    library = torch.library.Library("sgl_kernel", "DEF")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", hash_murmur3, "CompositeExplicitAutograd")
    return library
