"""The names in docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
NAME = re.compile(r"`([a-z_]+/[^`]+)`")


@cache
def documented() -> tuple[str, ...]:
    """As they stand there, places for names of the user's in angle brackets: first cells of tables, and main_sft's."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    return tuple(name for cell in [*cells, *_sft(lines)] for name in NAME.findall(cell))


def _sft(lines: Iterable[str]) -> Iterator[str]:
    text = "\n".join(lines)
    yield text[text.index("main_sft writes") :]


@cache
def _pattern() -> re.Pattern[str]:
    parts = [re.sub(r"<[^>]+>", ".*", re.sub(r"[.@]", r"\\\g<0>", name)) for name in documented()]
    return re.compile("|".join(parts))


def undocumented(names: Iterable[str]) -> list[str]:
    """Names of metrics that no line of docs/metrics.md has."""
    return sorted(name for name in set(names) - {"step"} if not _pattern().fullmatch(name))
