"""Where a fine-tuning stands: all of the driver's state that a checkpoint must hold (progress.json)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from alphaapollo.launch.checkpoint_folder import read_progress, write_progress


@dataclass
class Progress:
    """The driver's state after `step` optimiser steps."""

    step: int = 0
    examples_consumed: int = 0  # position in the stream of examples

    def write(self, folder: Path) -> None:
        write_progress(folder, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Progress:
        return cls(**read_progress(folder))
