"""Schedule periodic work such as checkpoints and validations."""

from __future__ import annotations

from typing import Literal

AUTO_SAVE_SECONDS = 600.0  # between two checkpoints with trainer.save_freq=auto


def is_due(step: int, frequency: int, is_last: bool) -> bool:
    """Return whether periodic work is due after iteration `step`: every `frequency` iterations and after the last one.
    frequency -1: never."""
    return frequency > 0 and (step % frequency == 0 or is_last)


def is_checkpoint_due(
    step: int, frequency: int | Literal["auto"], is_last: bool, has_score: bool, seconds: float
) -> bool:
    """Return whether a checkpoint is due after `step`.

    Args:
        frequency: as for is_due; auto = AUTO_SAVE_SECONDS after the last checkpoint, after the last step, and if the
            checkpoint has a score.
        has_score: whether trainer.keep_best compares the checkpoint with others.
        seconds: since the last checkpoint or the start.
    """
    if frequency == "auto":
        return is_last or has_score or seconds >= AUTO_SAVE_SECONDS
    return is_due(step, frequency, is_last)
