"""The reference's log-probs of all answers: computed once, before training, and kept in <run>/reference.npz.

The file says what it was made of: the weights, the tokens, the arithmetic. Another one than is asked for is made anew.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from alphaapollo.data.preference_examples import PreferenceExample


def digest_of(examples: Iterable[PreferenceExample], weights: str, dtype: str) -> str:
    """Of all that the log-probs depend on. weights: their digest; dtype: of the arithmetic."""
    sha = hashlib.sha256(f"{weights} {dtype}".encode())
    for example in examples:
        for row in example.scored:
            sha.update(np.array([len(row.token_ids), *row.token_ids, *row.action_mask], dtype=np.int64).tobytes())
    return sha.hexdigest()


def read_kept(path: Path, digest: str, notice: Callable[[str], None]) -> np.ndarray | None:
    """What was kept under this digest. float64 [rows of all examples]; None: nothing, or of something else."""
    if not path.exists():
        return None
    try:
        with np.load(path) as file:
            kept, logps = str(file["digest"]), file["logps"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        notice(f"{path} is damaged: the reference's log-probs are computed anew.")
        return None
    if kept != digest:
        notice(f"{path} is of other data or another model: the reference's log-probs are computed anew.")
        return None
    return np.asarray(logps, dtype=np.float64)


def keep(path: Path, digest: str, logps: np.ndarray) -> None:
    """Write it whole or not at all."""
    partial = path.with_name(f".writing_{path.name}")
    with partial.open("wb") as file:
        np.savez(file, digest=np.array(digest), logps=logps)
    partial.rename(path)


def give(examples: Sequence[PreferenceExample], logps: np.ndarray) -> None:
    """Each example its own, of `scored`."""
    given = iter(logps.tolist())
    for example in examples:
        example.ref_logps = [next(given) for _ in example.scored]
