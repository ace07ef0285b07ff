"""Train a reward model: `python -m alphaapollo.trainer.main_rm data.train_files=... model.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.schema import RmConfig
from alphaapollo.launch.command import run_training
from alphaapollo.utils.entry_point import entry_point


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    return run_training(RmConfig, "rm", "alphaapollo.finetuning.run", argv)


if __name__ == "__main__":
    sys.exit(main())
