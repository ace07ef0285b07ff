"""Write and read rollouts/trained_000012.parquet: what the trainer computed for each token of an iteration.

One row per token sequence that was trained on, with these columns:

    prompt_id, sample, row   the trajectory, and the number of the sequence among its rows in the rollout log
    logprobs                 log-probs of the trainer before the update, one per response token; null: not computed
    advantages               advantages, one per response token

The response of a sequence starts at its first token sampled by the model. Values of other tokens mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class TrainedRow:
    """What the trainer computed for one token sequence. Arrays: float32 [response tokens]."""

    prompt_id: int
    sample: int
    row: int  # index in Trajectory.rows
    logprobs: np.ndarray | None  # before the update
    advantages: np.ndarray

    def get_values(self, at: int) -> tuple[float | None, float]:
        """Return log-prob and advantage of a response token."""
        return None if self.logprobs is None else float(self.logprobs[at]), float(self.advantages[at])


def write_trained_rows(path: Path, rows: Sequence[TrainedRow]) -> None:
    """Write the rows of an iteration. The file appears when it is complete."""
    floats = pa.list_(pa.float32())
    table = pa.table(
        {
            "prompt_id": pa.array([row.prompt_id for row in rows], pa.int64()),
            "sample": pa.array([row.sample for row in rows], pa.int32()),
            "row": pa.array([row.row for row in rows], pa.int32()),
            "logprobs": pa.array([row.logprobs for row in rows], floats),
            "advantages": pa.array([row.advantages for row in rows], floats),
        }
    )
    part = path.with_name(f"{path.name}.part")
    pq.write_table(table, part, compression="zstd")
    part.replace(path)


def read_trained_rows(path: Path) -> list[TrainedRow]:
    """Read the rows of an iteration. Raises ValueError if the file is damaged."""
    return _read_trained_rows(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_trained_rows(path: Path, _mtime: int) -> list[TrainedRow]:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    identities = zip(*(table[name].to_pylist() for name in ("prompt_id", "sample", "row")), strict=True)
    columns = zip(*(table[name] for name in ("logprobs", "advantages")), strict=True)
    return [
        TrainedRow(*identity, *(None if value.as_py() is None else value.values.to_numpy() for value in values))
        for identity, values in zip(identities, columns, strict=True)
    ]
