"""metrics.jsonl: one line an iteration, flat numbers under names `group/name`, e.g. `reward/mean`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from alphaapollo.observability.disk import writing
from alphaapollo.observability.json_values import finite


class JsonlTracker:
    """metrics.jsonl: one flat JSON object an iteration, on the disk when `log` returns.

    A line is a finite float or null a name: `{"step": 3, "reward/mean": 0.5, "kl/mean": null}`.
    """

    def __init__(self, path: Path, resumed_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _cut_after(path, resumed_step)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with writing("the metrics", self._path):
            self._file.write(json.dumps(as_record(step, metrics), allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut_after(path: Path, step: int) -> None:
    """Keep the lines up to `step` (none of them for a new run), and not the half of a line that a kill has left."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not step or not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def as_record(step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """One flat line of metrics.jsonl: the step, then every metric as a finite float or null.

    >>> as_record(3, {"reward/mean": 0.5, "kl/mean": float("nan")})
    {'step': 3, 'reward/mean': 0.5, 'kl/mean': None}
    """
    record: dict[str, float | None] = {"step": step}
    for name, value in metrics.items():
        assert "/" in name, f"metric {name!r} has no group: name it group/name"
        record[name] = finite(value)
    return record
