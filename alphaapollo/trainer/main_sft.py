"""Supervised fine-tuning: `python -m alphaapollo.trainer.main_sft data.train_files=... model.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from alphaapollo.config.schema import SftConfig
from alphaapollo.finetuning.command import run_finetuning
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run supervised fine-tuning; returns the exit code of finetuning/command.py."""
    return run_finetuning(SftConfig, "sft", make_station, argv)


def make_station() -> Any:
    from alphaapollo.finetuning.sft import SftTask  # imports torch

    return SftTask()


if __name__ == "__main__":
    sys.exit(main())
