"""A key and its value as one word of the command line, whatever characters the value has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def word(key: str, value: Any) -> str:
    """`KEY=VALUE` that Hydra reads back as the value: text, numbers, true, null, lists of them, maps by names.

    >>> word("data.train_files", ["a b.parquet", "c=1.parquet"])
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
    """Hydra reads backslashes as they are, but before a quote."""
    parts = text.split("'")
    doubled = [part + "\\" * (len(part) - len(part.rstrip("\\"))) for part in parts]
    return "'" + "\\'".join(doubled) + "'"
