"""Convert values to JSON types."""

from __future__ import annotations

import math
from typing import Any


def finite(value: float) -> float | None:
    """Return the value as a float, or None for nan and inf."""
    value = float(value)
    return value if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Convert numpy arrays and numbers to JSON types, other objects to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
