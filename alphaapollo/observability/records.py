"""One line of metrics.jsonl: flat numbers under names `group/name`, e.g. `reward/mean`. trackers.py writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: float) -> float | None:
    """The value as a float, or None where JSON has no word for it (nan, inf)."""
    value = float(value)
    return value if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """What an environment's `info` may hold besides JSON's own types: arrays and numbers of numpy, else its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


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
