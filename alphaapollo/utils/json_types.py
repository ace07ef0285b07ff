"""Type of parsed JSON, and conversions to it. This module is imported everywhere, so it imports nothing large."""

from __future__ import annotations

import math
from typing import Any

JsonObject = dict[str, Any]
"""Parsed JSON object, or a value like it: YAML, a tool schema, the arguments of a tool call."""


def finite_or_none(value: float) -> float | None:
    """Return the value as a float, or None for NaN and infinity."""
    value = float(value)
    return value if math.isfinite(value) else None


def to_json_value(value: Any) -> Any:
    """Convert NumPy arrays and numbers to JSON types, and all other objects to text; of bytes only their number."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value.tolist() if hasattr(value, "tolist") else str(value)
