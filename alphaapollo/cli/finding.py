"""What a check of `alphaapollo doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line, e.g. `Finding("shared memory", "64 MiB free", "fail", "docker run --shm-size=8g")`."""

    what: str
    found: str
    level: Level = "ok"
    todo: str = ""  # empty where all is well


def by_size(what: str, found: str, size: float, fails_below: float, warns_below: float, todo: str) -> Finding:
    """ok, or what to do where a size is below a limit."""
    if size >= warns_below:
        return Finding(what, found)
    return Finding(what, found, "fail" if size < fails_below else "warn", todo)
