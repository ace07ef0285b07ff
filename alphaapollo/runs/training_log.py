"""Write and read rollouts/trained_000012.npz: what the trainer computed for each token of an iteration.

Arrays with one value per token sequence that was trained on:

    prompt_id, sample, row   the trajectory, and the number of the sequence among its rows in the rollout log
    num_tokens               response tokens of the sequence

Arrays with one value per response token of all sequences, in order. The response of a sequence starts at its first
token sampled by the model. Values of other tokens mean nothing.

    logprobs                 log-probs of the trainer before the update; NaN: not computed
    advantages               advantages
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np

from alphaapollo.utils.disk import replace_file


@dataclass(frozen=True)
class TrainedRow:
    """What the trainer computed for one token sequence. Arrays: float32 [response tokens]."""

    prompt_id: int
    sample: int
    row: int  # index in Trajectory.rows
    logprobs: np.ndarray | None  # before the update; None: not computed
    advantages: np.ndarray

    def get_values(self, at: int) -> tuple[float | None, float]:
        """Return log-prob and advantage of a response token."""
        return None if self.logprobs is None else float(self.logprobs[at]), float(self.advantages[at])


def write_trained_rows(path: Path, rows: Sequence[TrainedRow]) -> None:
    """Write the rows of an iteration. The file appears when it is complete."""
    nothing = np.zeros(0, np.float32)
    logprobs = [np.full_like(row.advantages, np.nan) if row.logprobs is None else row.logprobs for row in rows]
    content = BytesIO()
    np.savez(
        content,
        prompt_id=np.array([row.prompt_id for row in rows], np.int64),
        sample=np.array([row.sample for row in rows], np.int32),
        row=np.array([row.row for row in rows], np.int32),
        num_tokens=np.array([len(row.advantages) for row in rows], np.int64),
        logprobs=np.concatenate([nothing, *logprobs]),
        advantages=np.concatenate([nothing, *(row.advantages for row in rows)]),
    )
    replace_file(path, [content.getvalue()])


def read_trained_rows(path: Path) -> list[TrainedRow]:
    """Read the rows of an iteration. Raises ValueError if the file is damaged."""
    return _read_trained_rows(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_trained_rows(path: Path, _mtime: int) -> list[TrainedRow]:
    try:
        with np.load(path) as file:
            data = dict(file)
        spans = list(pairwise(np.concatenate([[0], np.cumsum(data["num_tokens"])])))
        identities = zip(data["prompt_id"].tolist(), data["sample"].tolist(), data["row"].tolist(), strict=True)
        parts = [(data["logprobs"][start:end], data["advantages"][start:end]) for start, end in spans]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    return [
        TrainedRow(*identity, None if np.isnan(logprobs).all() else logprobs, advantages)
        for identity, (logprobs, advantages) in zip(identities, parts, strict=True)
    ]
