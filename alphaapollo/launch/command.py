"""Entry points of commands with a run folder: training (main_ppo, main_sft, ...), main_generation, evolving.main."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import load_config, load_with_origin
from alphaapollo.config.schema import Config, EvolvingConfig, GenerationConfig, TuningConfig
from alphaapollo.observability.terminal import Terminal


def run_command(
    schema: type[GenerationConfig] | type[EvolvingConfig], name: str, program: str, argv: Sequence[str] | None
) -> int:
    """Load and check the configuration, print the plan, and run the command. Returns the exit code: 0 done, 1 failed,
    2 invalid before the start, 130 interrupted.

    program: module with `prepare(config, terminal)`, whose result has a `folder`, and `run(prepared, terminal)`. It
    imports torch, so it is imported after the configuration is read.
    """
    terminal = Terminal(highlight=False)
    with exit_on_config_error():
        config = load_config(schema, name, sys.argv[1:] if argv is None else argv)
        module = importlib.import_module(program)
        from alphaapollo.launch.run_command import run_in_folder, run_until_signal

        try:
            prepared = module.prepare(config, terminal)
        except ValueError as error:
            return report_error(error, 2)
    if config.trainer.dry_run:
        print("dry run: the configuration is valid, nothing was started.")
        return 0
    hint = f"interrupted; run the same command to resume from {prepared.folder}"
    return run_in_folder(prepared.folder, lambda: run_until_signal(module.run(prepared, terminal)), lambda: hint)


def run_training(schema: type[Config] | type[TuningConfig], name: str, program: str, argv: Sequence[str] | None) -> int:
    """Load and check the configuration and train, with up to trainer.max_restarts restarts. Returns the exit code.

    program: module with `prepare(config, origin)`, whose result is a RestartableRun, and `run(prepared, progress)`.
    """
    with exit_on_config_error():
        config, origin = load_with_origin(schema, name, sys.argv[1:] if argv is None else argv)
        module = importlib.import_module(program)
        from alphaapollo.launch.restarts import run_with_restarts
        from alphaapollo.launch.resume import completed_message, interrupted_message
        from alphaapollo.launch.run_command import run_in_folder
        from alphaapollo.utils.folder_lock import check_not_in_use

        folder = config.trainer.folder
        try:
            if not config.trainer.dry_run:
                check_not_in_use(folder)
            prepared = module.prepare(config, origin)
        except ValueError as error:
            return report_error(error, 2)
    if config.trainer.dry_run:
        print("dry run: the configuration is valid, nothing was started.")
        return 0
    if prepared.is_complete:
        print(completed_message(folder, prepared.start.step))
        return 0
    return run_in_folder(folder, lambda: run_with_restarts(prepared, module.run), lambda: interrupted_message(folder))
