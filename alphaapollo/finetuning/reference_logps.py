"""Reference log-probs of all responses, computed once before training and saved to <run>/reference.npz.

The file contains a digest of weights, tokens and dtype. If it does not match, the log-probs are computed again.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from alphaapollo.data.preference_examples import PreferenceExample


def reference_digest(examples: Iterable[PreferenceExample], weights: str, dtype: str) -> str:
    """Digest of everything the log-probs depend on. weights: digest of the weights; dtype: of the forward pass."""
    sha = hashlib.sha256(f"{weights} {dtype}".encode())
    for example in examples:
        for row in example.scored:
            sha.update(np.array([len(row.token_ids), *row.token_ids, *row.action_mask], dtype=np.int64).tobytes())
    return sha.hexdigest()


def read_reference(path: Path, digest: str, notice: Callable[[str], None]) -> np.ndarray | None:
    """Read the saved log-probs, float64 [rows of all examples]. Returns None if missing, damaged or of another
    digest."""
    if not path.exists():
        return None
    try:
        with np.load(path) as file:
            found, logps = str(file["digest"]), file["logps"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        notice(f"{path} is damaged; the reference log-probs are computed again.")
        return None
    if found != digest:
        notice(f"{path} was computed for other data or another model; the reference log-probs are computed again.")
        return None
    return np.asarray(logps, dtype=np.float64)


def save_reference(path: Path, digest: str, logps: np.ndarray) -> None:
    """Write the file atomically."""
    partial = path.with_name(f".writing_{path.name}")
    with partial.open("wb") as file:
        np.savez(file, digest=np.array(digest), logps=logps)
    partial.rename(path)


def assign_reference(examples: Sequence[PreferenceExample], logps: np.ndarray) -> None:
    """Set `ref_logps` of each example."""
    given = iter(logps.tolist())
    for example in examples:
        example.ref_logps = [next(given) for _ in example.scored]
