"""Make the `main` of commands with a run folder: training (main_ppo, main_sft, ...), evaluation and evolution."""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from alphaapollo.config.errors import exit_on_config_error
from alphaapollo.config.load import find_command_module, load_config_and_user_settings
from alphaapollo.config.schema import Config, EvolvingConfig, GenerationConfig, RmConfig, TuningConfig
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.observability.console import Console
from alphaapollo.observability.curve import Points, read_curves
from alphaapollo.observability.run_view import format_duration
from alphaapollo.processes.entry_point import MainFunction, entry_point
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, is_lower_better, list_checkpoints
from alphaapollo.runs.run_model import resolve_model_paths

CommandConfig = Config | TuningConfig | GenerationConfig | EvolvingConfig
MAIN_METRICS = (  # of each group, the first metric that the run has logged is summarized
    ("val/accuracy", "val/loss"),
    ("distill/divergence", "distill/reverse_kl"),
    ("distill/agreement",),
    ("reward/accuracy", "critic/score/mean", "train/loss"),
)


def make_command(schema: type[CommandConfig], config_name: str, module_name: str) -> MainFunction:
    """Return the `main` of a command, with the defaults of the YAML file `config_name`. Training commands restart.

    module_name: module with `prepare_run(config, user_settings, console)` and `run(prepared, progress, console)`;
        without training, `prepare_run(config, console)` and `run(prepared, console)`. It imports torch.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        with exit_on_config_error():
            words = sys.argv[1:] if argv is None else argv
            config, user_settings = load_config_and_user_settings(schema, config_name, words)
            config = resolve_model_paths(config)
        trainer, folder, trains = config.trainer, config.trainer.folder, isinstance(config, Config | TuningConfig)
        keep_best = getattr(trainer, "keep_best", None)
        with open_console(trainer) as console:
            module = importlib.import_module(module_name)
            from alphaapollo.launch.run_command import run_coroutine, run_in_locked_folder, run_with_restarts
            from alphaapollo.runs.resume import format_completed_run_message, resume_hint
            from alphaapollo.runs.run_history import record_in_history

            def run(prepared: Any) -> None:
                if trains and prepared.is_complete:
                    console.show_line(format_completed_run_message(prepared.start.step))
                    return
                with record_in_history(folder):
                    if trains:
                        run_with_restarts(prepared, module.run, console)
                    else:
                        run_coroutine(module.run(prepared, console))

            return run_in_locked_folder(
                trainer,
                console,
                lambda: module.prepare_run(config, *[user_settings] * trains, console),
                run,
                lambda: show_run_end(console, folder, keep_best, trains and not isinstance(config, RmConfig)),
                lambda: resume_hint(folder) if trains else f"run the same command to resume from {folder}",
            )

    main.__module__ = f"alphaapollo.{find_command_module(config_name)}"  # for messages that show the command
    return entry_point(main)


def open_console(trainer: RunSettings) -> Console:
    """Open the console of a command, and print the viewer's command unless it is a dry run."""
    console = Console()
    if not trainer.dry_run:
        console.show_line(f"{format_command('view', str(trainer.folder))}   # follow this run in the browser")
    return console.open(str(trainer.folder))


def show_run_end(console: Console, folder: Path, keep_best: str | None = None, can_chat: bool = False) -> None:
    """Print what a command has changed, however it ended, and the next commands. can_chat: the model is a policy."""
    lines: list[str] = []
    with suppress(OSError):  # e.g. the folder was removed
        lines += describe_changes(folder, console.elapsed, console.resumed_step)
        if count := console.num_warnings:
            lines.append(f"warnings: {count}, printed above")
        if best := CheckpointFolder(folder / "checkpoints", None, keep_best).find_best():
            lines.append(f"{keep_best} is best in {best}")
        lines += [f"model: {folder / 'model'}"] * (folder / "model").is_dir()
        lines += list_next_commands(folder, can_chat)
    console.show_end(lines)


def describe_changes(folder: Path, seconds: float, resumed_step: int | None) -> list[str]:
    """Describe how the main metrics of a run changed, e.g. `val/accuracy  0.508 -> 0.984 in 60 iterations (4:10)`.

    seconds: duration of this command. resumed_step: iteration from which it resumed; None: it ran no iterations.
    """
    since = f" since iteration {resumed_step}" if resumed_step else ""
    time = "" if resumed_step is None else f" ({format_duration(seconds)}{since})"
    lines = []
    for names in MAIN_METRICS:
        for name in names:
            with suppress(OSError, ValueError):  # the run has no such metric, or metrics.jsonl is damaged
                (points,) = read_curves(folder / "metrics.jsonl", [name]).values()
                lines.append(f"{name:<18} {_describe_change(name, points)}{time}")
                time = ""
                break
    return lines


def _describe_change(name: str, points: Points) -> str:
    (start, first), (end, last) = points[0], points[-1]
    if start == end:
        return f"{last:.3f} in iteration {end}"
    begin = f"{first:.3f}" if start <= 1 else f"{first:.3f} (iteration {start})"
    best_step, best = (min if is_lower_better(name) else max)(points[::-1], key=lambda point: point[1])
    addition = f", best {best:.3f} in iteration {best_step}" if best != last else ""
    return f"{begin} -> {last:.3f} in {end} iterations{addition}"


def list_next_commands(folder: Path, can_chat: bool) -> list[str]:
    """Return a heading and the commands that can continue with a run folder, each with a comment."""
    run, has_model = str(folder), (folder / "model").is_dir()
    has_samples = any(folder.glob("rollouts/*.jsonl")) or (folder / "results.jsonl").exists()
    has_checkpoints = bool(list_checkpoints(folder))
    commands = [
        (["view", run], "curves and samples in the browser", True),
        (["report", run, "-o", "report.html"], "all in one file", (folder / "metrics.jsonl").exists()),
        (["samples", run], "answers side by side", has_samples),
        (["chat", run], "chat with the model", can_chat and (has_model or has_checkpoints)),
        (["export", run], "for transformers and vLLM", has_checkpoints and not has_model),
    ]
    shown = [f"  {format_command(*words)}   # {comment}" for words, comment, applies in commands if applies]
    return ["next commands:", *shown]


def format_command(*words: str) -> str:
    """Return a subcommand of alphaapollo as it can be typed here, e.g. `alphaapollo view outputs/first`."""
    program = ["alphaapollo"] if shutil.which("alphaapollo") else [os.path.relpath(sys.executable), "-m", "alphaapollo"]
    return shlex.join([*program, *words])
