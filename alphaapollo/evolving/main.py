"""Improve answers without training: `python -m alphaapollo.evolving.main data.path=... models.policy.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.errors import failed, reported
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.observability.terminal import Terminal
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, print the plan, run. Returns 0 done, 1 failed, 2 refused before the start, 130 interrupted."""
    terminal = Terminal(highlight=False)
    with reported():
        config = load_config(EvolvingConfig, "evolving", sys.argv[1:] if argv is None else argv)
        from alphaapollo.evolving.run import prepare, run  # torch from here on: a wrong key is told before
        from alphaapollo.launch.run_command import drive, run_until_told

        try:
            prepared = prepare(config, terminal)
        except ValueError as error:
            return failed(error, 2)
    if config.trainer.dry_run:
        print("dry run: the configuration is sound, nothing was started.")
        return 0
    end = f"interrupted; the same command goes on where {prepared.folder} ends"
    return drive(prepared.folder, lambda: run_until_told(run(prepared, terminal)), lambda: end)


if __name__ == "__main__":
    sys.exit(main())
