"""Result of a check of `alphaapollo doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckResult:
    """One line, e.g. `CheckResult("shared memory", "64 MiB free", "fail", "docker run --shm-size=8g")`."""

    what: str
    found: str
    level: Level = "ok"
    todo: str = ""  # how to fix it; empty if ok


def check_size(what: str, found: str, size: float, fails_below: float, warns_below: float, todo: str) -> CheckResult:
    """Compare a size with two limits."""
    if size >= warns_below:
        return CheckResult(what, found)
    return CheckResult(what, found, "fail" if size < fails_below else "warn", todo)
