"""Make the `main` of commands with a run folder: training (main_ppo, main_sft, ...), evaluation and evolution.

parse the command line -> lock the folder -> prepare -> run -> print what has changed, or the error

After the death of a worker, a training command restarts (trainer.max_restarts), as if the user ran it again:
run -> a worker dies -> kill every process of the run -> find the newest undamaged checkpoint -> run
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import copy
from pathlib import Path
from typing import Any

from alphaapollo.config.errors import exit_on_config_error, report_error
from alphaapollo.config.load import find_command_module, load_config_and_user_settings
from alphaapollo.config.metrics import is_lower_better, list_end_metrics
from alphaapollo.config.schema import Config, InferenceConfig, RmConfig, TuningConfig
from alphaapollo.config.schema.trainer import RunSettings
from alphaapollo.controller.errors import REPORTED_ERRORS, WorkerLost
from alphaapollo.launch.early_imports import import_engine_early
from alphaapollo.launch.inputs import detect_node_resources
from alphaapollo.observability.console import Console
from alphaapollo.observability.curve import Curve, read_curves
from alphaapollo.observability.metric_texts import format_duration
from alphaapollo.processes.entry_point import MainFunction, entry_point
from alphaapollo.processes.folder_lock import lock_folder
from alphaapollo.processes.watchdog import RUN, kill_run_processes
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, list_checkpoints, parse_step
from alphaapollo.runs.command_history import record_in_history
from alphaapollo.runs.newest_model import resolve_model_paths
from alphaapollo.runs.resume import find_start_point, format_completed_run_message, resume_hint
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.imports import pause_gc
from alphaapollo.utils.plugins import is_available

CommandConfig = Config | TuningConfig | InferenceConfig


def make_command(schema: type[CommandConfig], config_name: str, module_name: str) -> MainFunction:
    """Return the `main` of a command, with the defaults of the YAML file `config_name`. `main` returns the exit code:
    0 done, 1 failed, 2 refused before the start, 130 interrupted.

    module_name: module with `prepare_run(config, user_settings, console)`, which returns a Preparation, and with
        `run(prepared)`, or `run(prepared, progress)` if the command trains. Importing it imports torch.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        with exit_on_config_error():
            words = sys.argv[1:] if argv is None else argv
            config, user_settings = load_config_and_user_settings(schema, config_name, words)
            config = resolve_model_paths(config)
        trainer, trains, prepared = config.trainer, isinstance(config, Config | TuningConfig), None

        def make_hint() -> str:
            return resume_hint(trainer.folder) if trains else f"run the same command to resume from {trainer.folder}"

        try:
            lock = nullcontext() if trainer.dry_run else lock_folder(trainer.folder)
            with open_console(trainer) as console, lock, import_engine_early(config):
                with HEARTBEAT.record_call("prepare"), pause_gc():  # most of the time is spent on imports
                    module = importlib.import_module(module_name)
                    prepared = module.prepare_run(config, user_settings, console)
                if trainer.dry_run:
                    console.show_line("dry run: the configuration is valid, nothing was started.")
                    return 0
                console.status_folder = trainer.folder
                try:
                    if trains and prepared.is_complete:
                        early_end = prepared.goal.describe_early_end(prepared.progress)
                        console.show_line(format_completed_run_message(prepared.start.step, early_end))
                    elif trains:
                        with record_in_history(trainer.folder):
                            run_with_restarts(prepared, module.run, console)
                    else:
                        with record_in_history(trainer.folder):
                            run_coroutine(module.run(prepared))
                finally:
                    show_run_end(console, config)
        except KeyboardInterrupt:
            print(f"\ninterrupted; {make_hint()}", file=sys.stderr)
            return 130
        except REPORTED_ERRORS as error:  # the console is closed
            if prepared and (hint := make_hint()) not in str(error):
                print(hint)
            return report_error(error, 1 if prepared or not isinstance(error, ValueError) else 2)
        return 0

    main.__module__ = find_command_module(schema, config_name)  # for messages that show the command
    return entry_point(main)


def run_coroutine(coroutine: Coroutine[object, None, None]) -> None:
    """Run a coroutine. After SIGINT, which often ends workers, raise KeyboardInterrupt instead of WorkerLost."""
    with asyncio.Runner() as runner:
        try:
            runner.run(coroutine)
        except WorkerLost as death:
            if runner._interrupt_count:  # type: ignore[attr-defined]
                raise KeyboardInterrupt from death
            raise


def run_with_restarts(prepared: Any, run: Callable[..., Coroutine[object, None, None]], console: Console) -> None:
    """Train to the last iteration, with restarts after deaths of workers. Raises WorkerLost if that is not possible.

    prepared: Preparation of a training with `progress` (RunProgress), which `run` updates after each iteration.
    """
    trainer, restarts = prepared.config.trainer, 0
    last_death: tuple[int, str] | None = None  # iteration and role of the last death
    while True:
        progress = prepared.progress
        try:
            with clean_up_processes():
                run_coroutine(run(prepared, progress))
            return
        except WorkerLost as death:
            iteration, cause, reason = progress.step + 1, death.cause.rstrip("."), ""
            if last_death == (iteration, death.role):
                reason = f"another restart would not help, because the previous death was also in iteration {iteration}"
            elif restarts == trainer.max_restarts:
                reason = f"trainer.max_restarts={restarts} allows no further restart"
            if reason:
                raise WorkerLost(f"{cause}; {reason}; {resume_hint(trainer.folder)}", death.role) from death
            last_death, restarts = (iteration, death.role), restarts + 1
            console.warn(f"{cause}; restart {restarts} of at most {trainer.max_restarts} (trainer.max_restarts)")
            with HEARTBEAT.record_call("restart"):
                prepared = prepare_restart_from_newest_checkpoint(prepared, console)


def prepare_restart_from_newest_checkpoint(prepared: Any, console: Console) -> Any:
    """Return the run with its newest checkpoint as start point, or with its earlier start point if it has none."""
    config, trainer = prepared.config, prepared.config.trainer
    written = list_checkpoints(trainer.folder)
    if any(parse_step(checkpoint) > prepared.start.step for checkpoint in written):  # written by this command
        config = config.model_copy(update={"trainer": trainer.model_copy(update={"resume_mode": "auto"})})
    detect_node_resources(config)  # joins the Ray cluster again, if there is one
    start = find_start_point(config, prepared.start.inputs.digests)  # the files may have changed meanwhile
    for line in start.describe() or ["starts from scratch."]:
        console.show_line(line)
    prepared = copy(prepared)
    prepared.config, prepared.start = config, start
    return prepared


@contextmanager
def clean_up_processes() -> Iterator[None]:
    """Context manager that kills every process of the run at its end and restores the environment variables."""
    before = dict(os.environ)
    try:
        yield
    finally:
        run_id = os.environ.get(RUN)
        os.environ.clear()
        os.environ.update(before)
        if run_id not in (None, before.get(RUN)):
            kill_run_processes(run_id)


def open_console(trainer: RunSettings) -> Console:
    """Open the console of a command, and print the viewer's command unless it is a dry run."""
    console = Console()
    if not trainer.dry_run and is_available("commands", "view"):
        console.show_line(f"{format_command('view', str(trainer.folder))}   # follow this run in the browser")
    return console.open(str(trainer.folder))


def show_run_end(console: Console, config: CommandConfig) -> None:
    """Print what a command has changed, however it ended, and the next commands."""
    lines, folder, keep_best = list[str](), config.trainer.folder, getattr(config.trainer, "keep_best", None)
    with suppress(OSError):  # e.g. the folder was removed
        lines += describe_changes(folder, console.elapsed, console.resumed_step)
        if count := console.num_warnings:
            lines.append(f"warnings: {count}, printed above")
        if best := CheckpointFolder(folder / "checkpoints", None, keep_best).find_best():
            lines.append(f"{keep_best} is best in {best}")
        lines += [f"model: {folder / 'model'}"] if (folder / "model").is_dir() else []
        trains_policy = isinstance(config, Config | TuningConfig) and not isinstance(config, RmConfig)
        lines += list_next_commands(folder, trains_policy)
    console.show_end(lines)


def describe_changes(folder: Path, seconds: float, resumed_step: int | None) -> list[str]:
    """Describe how the main metrics of a run changed, e.g. `val/accuracy  0.508 -> 0.984 in 60 iterations (4:10)`.

    seconds: duration of this command. resumed_step: iteration from which it resumed; None: it ran no iterations.
    """
    since = f" since iteration {resumed_step}" if resumed_step else ""
    duration = "" if resumed_step is None else f" ({format_duration(seconds)}{since})"
    lines = []
    for names in list_end_metrics():
        for name in names:
            with suppress(OSError, ValueError):  # the run has no such metric, or metrics.jsonl is damaged
                (curve,) = read_curves(folder / "metrics.jsonl", [name]).values()
                lines.append(f"{name:<18} {_describe_change(curve)}{duration}")
                duration = ""  # only the first line has it
                break
    return lines


def _describe_change(curve: Curve) -> str:
    first, last, start, end = *curve.values[[0, -1]], *curve.steps[[0, -1]].astype(int)
    if start == end:
        return f"{last:.3f} in iteration {end}"
    begin = f"{first:.3f}" if start <= 1 else f"{first:.3f} (iteration {start})"
    at = curve.values.argmin() if is_lower_better(curve.name) else curve.values.argmax()
    best, step = curve.values[at], int(curve.steps[at])
    addition = f", best {best:.3f} in iteration {step}" if best != last else ""
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
    shown = [
        f"  {format_command(*words)}   # {comment}"
        for words, comment, applies in commands
        if applies and (words[0] == "export" or is_available("commands", words[0]))
    ]
    return ["next commands:", *shown] if shown else []


def format_command(*words: str) -> str:
    """Return a subcommand of alphaapollo as it can be typed here, e.g. `alphaapollo view outputs/first`."""
    program = ["alphaapollo"] if shutil.which("alphaapollo") else [os.path.relpath(sys.executable), "-m", "alphaapollo"]
    return shlex.join([*program, *words])
