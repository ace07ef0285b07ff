"""Schedule periodic work such as checkpoints and validations."""

from __future__ import annotations


def is_due(step: int, frequency: int, is_last: bool) -> bool:
    """Return whether periodic work is due after iteration `step`: every `frequency` iterations and after the last one.
    frequency -1: never."""
    return frequency > 0 and (step % frequency == 0 or is_last)
