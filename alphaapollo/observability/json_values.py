"""Values as JSON has them."""

from __future__ import annotations

import math
from typing import Any


def finite(value: float) -> float | None:
    """The value as a float, or None where JSON has no word for it (nan, inf)."""
    value = float(value)
    return value if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """What an environment's `info` may hold besides JSON's own types: arrays and numbers of numpy, else its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
