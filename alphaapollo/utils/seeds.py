"""Derive seeds from the position of a random draw, never from its time."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Derive a seed in [0, 2**63) from parts, e.g. `derive_seed(run_seed, "rollout", draw, prompt.id, sample,
    turn)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
