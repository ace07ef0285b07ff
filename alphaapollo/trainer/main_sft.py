"""Supervised fine-tuning: `python -m alphaapollo.trainer.main_sft data.train_files=... model.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from alphaapollo.config.schema import SftConfig
from alphaapollo.finetuning.command import tune
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """As finetuning/command.py has it."""
    return tune(SftConfig, "sft", make_station, argv)


def make_station() -> Any:
    from alphaapollo.finetuning.sft import Sft  # torch from here on

    return Sft()


if __name__ == "__main__":
    sys.exit(main())
