"""Derive seeds from what a random draw is for (run, prompt, sample, turn), never from when it happens."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) for the parts, e.g. `derive_seed(run_seed, "rollout", draw, prompt.id, sample)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
