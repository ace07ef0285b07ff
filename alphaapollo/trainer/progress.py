"""Where a run stands: all of the driver's state that a checkpoint must hold (progress.json)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from alphaapollo.run_folder import read_progress, write_progress


@dataclass
class Progress:
    """The driver's state after `step` whole iterations."""

    step: int = 0
    prompts_consumed: int = 0  # position in the stream of training prompts
    kl_coef: float = 0.0  # of the KL in the reward, as its controller has set it
    best_accuracy: float | None = None  # of all validations
    validations_without_gain: int = 0  # in a row, since the last reset of the reference
    reference_resets: int = 0

    def write(self, folder: Path) -> None:
        write_progress(folder, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Progress:
        return cls(**read_progress(folder))
