"""Sample and score without training: `python -m alphaapollo.trainer.main_generation data.path=... data.n_samples=8`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.schema import GenerationConfig
from alphaapollo.launch.command import run_inference
from alphaapollo.utils.entry_point import entry_point


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    return run_inference(GenerationConfig, "generation", "alphaapollo.evaluation.generation", argv)


if __name__ == "__main__":
    sys.exit(main())
