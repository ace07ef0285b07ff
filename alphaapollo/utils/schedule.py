"""When what comes due."""

from __future__ import annotations


def due(step: int, frequency: int, is_last: bool) -> bool:
    """Every `frequency` iterations and at the end; -1 = never."""
    return frequency > 0 and (step % frequency == 0 or is_last)
