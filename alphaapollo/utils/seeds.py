"""Derive random seeds from the purpose of a random number (e.g. run, prompt, sample), independent of time and order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable


def derive_seed(*parts: int | str) -> int:
    """Hash the parts to a seed in [0, 2**63), e.g. `derive_seed(run_seed, "rollout", prompt.id, sample)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def derive_seeds(seed: int, keys: Iterable[int]) -> list[int]:
    """Return a seed for each key: `seed` where a key occurs first, and a different seed at each repeat."""
    counts, seeds = Counter[int](), list[int]()
    for key in keys:
        seeds.append(derive_seed(seed, "repeat", counts[key]) if counts[key] else seed)
        counts[key] += 1
    return seeds
