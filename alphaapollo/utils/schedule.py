"""Schedules of periodic work."""

from __future__ import annotations


def is_due(step: int, frequency: int, is_last: bool) -> bool:
    """Return whether periodic work is due at `step`: every `frequency` iterations and at the end; -1 = never."""
    return frequency > 0 and (step % frequency == 0 or is_last)
