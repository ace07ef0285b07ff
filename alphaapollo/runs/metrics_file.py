"""metrics.jsonl of a run folder: one line per iteration with numbers named `group/name`, e.g. `critic/score/mean`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from alphaapollo.utils.disk import explain_write_errors, open_regular, parse_json, replace_file
from alphaapollo.utils.json_types import JsonObject, finite_or_none


class JsonlTracker:
    """Tracker that writes metrics.jsonl. A line is on disk when `log` returns.

    Values are finite floats or null: `{"step": 3, "critic/score/mean": 0.5, "kl/mean": null}`.
    """

    def __init__(self, path: Path, resumed_step: int, notice: Callable[[str], None] = print):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for text in _remove_lines_after(path, resumed_step):
                notice(text)
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        os.fsync(self._file.fileno())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with explain_write_errors("the metrics", self._path):
            self._file.write(json.dumps(make_metrics_record(step, metrics), allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _remove_lines_after(path: Path, step: int) -> list[str]:
    """Remove lines of metrics.jsonl that cannot be parsed or belong to iterations after `step`; all lines for step 0 (a
    new run). Returns a notice about lines that cannot be parsed, except an unfinished last line."""
    lines = _read_lines(path, keepends=True) if step else []
    steps = [_parse_step(line) for line in lines]
    replace_file(path, [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step])
    damaged = [str(i + 1) for i, at in enumerate(steps) if at is None and lines[i].endswith(b"\n")]
    return [f"{path}: lines {', '.join(damaged)} cannot be parsed and were removed."] if damaged else []


def _read_lines(path: Path, keepends: bool = False) -> list[bytes]:
    with open_regular(path) as file:
        return file.read().splitlines(keepends)


def read_metrics(path: Path) -> list[JsonObject]:
    """Read the lines of a metrics.jsonl, without a last line that a kill has left unfinished. Raises OSError without a
    file, and ValueError if a line is damaged."""
    lines = _read_lines(path)
    return [parse_json(line) for line in lines if line.endswith(b"}")]


def read_logged_steps(path: Path) -> list[int]:
    """Return the iterations in a metrics.jsonl; empty if there is no file. Raises OSError if it cannot be read."""
    lines = _read_lines(path) if path.exists() else []
    return [step for line in lines if (step := _parse_step(line)) is not None]


def _parse_step(line: bytes) -> int | None:
    """Return the iteration of a line of metrics.jsonl, or None if the line is invalid."""
    with suppress(ValueError, TypeError, KeyError, OverflowError):
        return int(parse_json(line)["step"])
    return None


def make_metrics_record(step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Build a line of metrics.jsonl: the step, then every metric as a finite float or null.

    >>> make_metrics_record(3, {"critic/score/mean": 0.5, "kl/mean": float("nan")})
    {'step': 3, 'critic/score/mean': 0.5, 'kl/mean': None}
    """
    record: dict[str, float | None] = {"step": step}
    for name, value in metrics.items():
        assert "/" in name, f"metric {name!r} has no group. Use a name group/name"
        record[name] = finite_or_none(value)
    return record
