"""Train with reinforcement learning: `python -m alphaapollo.trainer.main_ppo algorithm.adv_estimator=grpo ...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.schema import Config
from alphaapollo.launch.command import run_training
from alphaapollo.utils.entry_point import entry_point


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    return run_training(Config, "ppo", "alphaapollo.trainer.lifecycle", argv)


if __name__ == "__main__":
    sys.exit(main())
