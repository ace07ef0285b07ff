"""Improve answers without training: `python -m alphaapollo.evolving.main data.path=... models.policy.path=...`"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from rich.console import Console as Terminal

from alphaapollo.caller import command
from alphaapollo.config.errors import failed, reported
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.folder_lock import FolderInUseError, lone_driver
from alphaapollo.watchdog import end_when_told


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, print the plan, run. Returns 0 done, 1 failed, 2 refused before the start, 130 interrupted."""
    terminal = Terminal(highlight=False)
    with reported():
        config = load_config(EvolvingConfig, "evolving", sys.argv[1:] if argv is None else argv)
        from alphaapollo.evolving.run import prepare, run  # torch from here on: a wrong key is told before
        from alphaapollo.startup.failures import FAILURES

        try:
            prepared = prepare(config, terminal)
        except ValueError as error:
            return failed(error, 2)
    if config.trainer.dry_run:
        print("dry run: the configuration is sound, nothing was started.")
        return 0
    end_when_told()
    try:
        with lone_driver(prepared.folder):
            asyncio.run(run(prepared, terminal))
    except FolderInUseError as error:
        return failed(error, 2)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on where {prepared.folder} ends", file=sys.stderr)
        return 130
    except FAILURES as error:
        return failed(error, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
