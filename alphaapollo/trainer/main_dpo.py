"""Training on preferences: `python -m alphaapollo.trainer.main_dpo data.train_files=... model.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from alphaapollo.config.schema import DpoConfig
from alphaapollo.finetuning.command import tune
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """As finetuning/command.py has it."""
    return tune(DpoConfig, "dpo", make_station, argv)


def make_station() -> Any:
    from alphaapollo.finetuning.dpo import Dpo  # torch from here on

    return Dpo()


if __name__ == "__main__":
    sys.exit(main())
