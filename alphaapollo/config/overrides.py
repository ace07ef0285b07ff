"""Command-line overrides: `KEY=VALUE` with any characters in the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_override(key: str, value: Any) -> str:
    """Format `KEY=VALUE` so that Hydra parses the same value: text, numbers, booleans, null, lists and maps.

    >>> format_override("data.train_files", ["a b.parquet", "c=1.parquet"])
    "data.train_files=['a b.parquet','c=1.parquet']"
    """
    return f"{key}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _quoted(text: str) -> str:
    """Quote a text; Hydra treats backslashes literally except before a quote."""
    parts = text.split("'")
    doubled = [part + "\\" * (len(part) - len(part.rstrip("\\"))) for part in parts]
    return "'" + "\\'".join(doubled) + "'"
