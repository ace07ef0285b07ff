"""Training a reward model: `python -m alphaapollo.trainer.main_rm data.train_files=... model.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from alphaapollo.config.schema import RmConfig
from alphaapollo.finetuning.command import tune
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """As finetuning/command.py has it."""
    return tune(RmConfig, "rm", make_station, argv)


def make_station() -> Any:
    from alphaapollo.finetuning.rm import Rm  # torch from here on

    return Rm()


if __name__ == "__main__":
    sys.exit(main())
