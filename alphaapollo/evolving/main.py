"""Improve answers at inference time: `python -m alphaapollo.evolving.main data.path=... models.policy.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.launch.command import run_inference
from alphaapollo.utils.entry_point import entry_point


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    return run_inference(EvolvingConfig, "evolving", "alphaapollo.evolving.run", argv)


if __name__ == "__main__":
    sys.exit(main())
