"""Entry point: `python -m alphaapollo.evolving.main data.path=... models.policy.path=...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import EvolvingConfig
from alphaapollo.observability.terminal import Terminal
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run an evolution. Returns 0 after success, 1 after a failure, 2 for an invalid start, 130 if interrupted."""
    terminal = Terminal(highlight=False)
    with exit_on_config_error():
        config = load_config(EvolvingConfig, "evolving", sys.argv[1:] if argv is None else argv)
        from alphaapollo.evolving.run import prepare, run  # slow imports, after the configuration is checked
        from alphaapollo.launch.run_command import run_in_folder, run_until_signal

        try:
            prepared = prepare(config, terminal)
        except ValueError as error:
            return report_error(error, 2)
    if config.trainer.dry_run:
        print("dry run: the configuration is valid; nothing was started.")
        return 0
    hint = f"interrupted; run the same command to resume from {prepared.folder}"
    return run_in_folder(prepared.folder, lambda: run_until_signal(run(prepared, terminal)), lambda: hint)


if __name__ == "__main__":
    sys.exit(main())
