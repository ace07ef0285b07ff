"""Train a reward model: `python -m alphaapollo.trainer.main_rm data.train_files=... model.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from alphaapollo.config.schema import RmConfig
from alphaapollo.finetuning.command import run_finetuning
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Train a reward model; returns the exit code of finetuning/command.py."""
    return run_finetuning(RmConfig, "rm", make_station, argv)


def make_station() -> Any:
    from alphaapollo.finetuning.reward_model import RewardModelTask  # imports torch

    return RewardModelTask()


if __name__ == "__main__":
    sys.exit(main())
