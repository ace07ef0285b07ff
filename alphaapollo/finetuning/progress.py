"""Progress of a fine-tuning run: the driver's state in a checkpoint (progress.json)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from alphaapollo.launch.checkpoint_folder import read_progress, write_progress


@dataclass
class Progress:
    """State of the driver after `step` optimizer steps."""

    step: int = 0
    examples_consumed: int = 0  # position in the stream of examples
    validation: dict[str, float] = field(default_factory=dict)  # metrics of the step's validation, if it had one

    def write(self, folder: Path) -> None:
        write_progress(folder, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Progress:
        return cls(**read_progress(folder))
