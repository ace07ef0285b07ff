"""Train on preferences: `python -m alphaapollo.trainer.main_dpo data.train_files=... model.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from alphaapollo.config.schema import DpoConfig
from alphaapollo.finetuning.command import run_finetuning
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Train on preferences; returns the exit code of finetuning/command.py."""
    return run_finetuning(DpoConfig, "dpo", make_station, argv)


def make_station() -> Any:
    from alphaapollo.finetuning.dpo import DpoTask  # imports torch

    return DpoTask()


if __name__ == "__main__":
    sys.exit(main())
