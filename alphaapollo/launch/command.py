"""Make the `main` of commands with a run folder: training (main_ppo, main_sft, ...), main_generation, evolving.main."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from alphaapollo.config.errors import exit_on_config_error
from alphaapollo.config.load import find_command_module, load_config, load_config_and_user_settings
from alphaapollo.config.schema import Config, EvolvingConfig, GenerationConfig, RmConfig, TuningConfig
from alphaapollo.launch.run_end import open_console, show_run_end
from alphaapollo.launch.run_model import resolve_model_paths
from alphaapollo.utils.entry_point import MainFunction, entry_point


def make_inference_command(
    schema: type[GenerationConfig] | type[EvolvingConfig], config_name: str, module_name: str
) -> MainFunction:
    """Return the `main` of a command without training, with the defaults of the YAML file `config_name`.

    module_name: module with `prepare_run(config, console)` and `run(prepared, console)`, which imports torch.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        with exit_on_config_error():
            config = resolve_model_paths(load_config(schema, config_name, sys.argv[1:] if argv is None else argv))
        folder = config.trainer.folder
        with open_console(config.trainer) as console:
            module = importlib.import_module(module_name)
            from alphaapollo.launch.run_command import run_coroutine, run_in_locked_folder
            from alphaapollo.launch.run_history import record_in_history

            def run(prepared: object) -> None:
                with record_in_history(folder):
                    run_coroutine(module.run(prepared, console))

            return run_in_locked_folder(
                config.trainer,
                console,
                lambda: module.prepare_run(config, console),
                run,
                lambda: show_run_end(console, folder),
                lambda: f"run the same command to resume from {folder}",
            )

    return _make_entry_point(main, config_name)


def make_training_command(
    schema: type[Config] | type[TuningConfig], config_name: str, module_name: str
) -> MainFunction:
    """Return the `main` of a training command with restarts, with the defaults of the YAML file `config_name`.

    module_name: module with `prepare_run(config, user_settings, console)` and `run(prepared, progress, console)`.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        with exit_on_config_error():
            words = sys.argv[1:] if argv is None else argv
            config, user_settings = load_config_and_user_settings(schema, config_name, words)
            config = resolve_model_paths(config)
        trainer, folder, can_chat = config.trainer, config.trainer.folder, not isinstance(config, RmConfig)
        with open_console(trainer) as console:
            module = importlib.import_module(module_name)
            from alphaapollo.launch.restarts import run_with_restarts
            from alphaapollo.launch.resume import format_completed_run_message, resume_hint
            from alphaapollo.launch.run_command import run_in_locked_folder
            from alphaapollo.launch.run_history import record_in_history

            def train(prepared_run: Any) -> None:
                if prepared_run.is_complete:
                    console.show_line(format_completed_run_message(prepared_run.start.step))
                    return
                with record_in_history(folder):
                    run_with_restarts(prepared_run, module.run, console)

            return run_in_locked_folder(
                trainer,
                console,
                lambda: module.prepare_run(config, user_settings, console),
                train,
                lambda: show_run_end(console, folder, trainer.keep_best, can_chat),
                lambda: resume_hint(folder),
            )

    return _make_entry_point(main, config_name)


def _make_entry_point(main: MainFunction, config_name: str) -> MainFunction:
    main.__module__ = f"alphaapollo.{find_command_module(config_name)}"  # for messages that show the command
    return entry_point(main)
