"""The names in docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NAME = re.compile(r"`([a-z_]+/[^`]+)`")


@cache
def documented() -> tuple[str, ...]:
    """Names in the first cells of all tables, with placeholders in angle brackets."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return tuple(dict.fromkeys(name for cell in cells for name in NAME.findall(cell)))


@cache
def _pattern() -> re.Pattern[str]:
    parts = [re.sub(r"<[^>]+>", ".*", re.sub(r"[.@]", r"\\\g<0>", name)) for name in documented()]
    return re.compile("|".join(parts))


def undocumented(names: Iterable[str]) -> list[str]:
    """Names of metrics that docs/metrics.md lacks."""
    return sorted(name for name in set(names) - {"step"} if not _pattern().fullmatch(name))
