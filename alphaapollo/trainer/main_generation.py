"""Sample and score without training: `python -m alphaapollo.trainer.main_generation data.path=... data.n_samples=8`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import GenerationConfig
from alphaapollo.observability.terminal import Terminal
from alphaapollo.utils.entry_point import command


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Load the configuration, check it, print the plan, generate. Returns 0 if done, 1 if failed, 2 if refused before
    the start, 130 if interrupted."""
    terminal = Terminal(highlight=False)
    with exit_on_config_error():
        config = load_config(GenerationConfig, "generation", sys.argv[1:] if argv is None else argv)
        from alphaapollo.evaluation.generation import prepare, run  # imports torch; wrong keys fail before
        from alphaapollo.launch.run_command import run_in_folder, run_until_signal

        try:
            generation = prepare(config, terminal)
        except ValueError as error:
            return report_error(error, 2)
    if config.trainer.dry_run:
        print("dry run: the configuration is valid, nothing was started.")
        return 0
    end = f"interrupted; the same command resumes with what is missing in {generation.folder}"
    return run_in_folder(generation.folder, lambda: run_until_signal(run(generation, terminal)), lambda: end)


if __name__ == "__main__":
    sys.exit(main())
