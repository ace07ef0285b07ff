"""Start point of a run: the checkpoint to resume from, and the configuration changes since it was written.

find_start only reads. `StartPoint.claim` prepares the folder when the run starts: it moves a previous run aside if the
new run starts from scratch, and saves the configuration. config.yaml is the configuration of the first start. Each
resume that changes it writes config.1.yaml, config.2.yaml, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from alphaapollo.config.changes import Change, find_changes, find_command
from alphaapollo.config.keys import COMMANDS, format_value
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config, EvalConfig, EvolvingConfig, GenerationConfig, TuningConfig
from alphaapollo.launch.checkpoint_folder import (
    PROGRESS,
    CheckpointFolder,
    find_damage,
    find_step_mismatch,
    move_aside,
    parse_step,
    read_progress,
)
from alphaapollo.observability.metrics_file import read_logged_steps

ADDRESS = ("trainer.project_name", "trainer.experiment_name", "trainer.output_dir")
NEW_RUN_HINT = (
    "Set another trainer.experiment_name, or trainer.resume_mode=disable to start from scratch (the previous run is "
    "moved aside)."
)


@dataclass(frozen=True)
class StartPoint:
    """Start point of a run. Creating it changes nothing on disk."""

    folder: Path
    checkpoint: Path | None = None
    step: int = 0  # number of completed iterations in the checkpoint
    changes: tuple[Change, ...] = ()
    damaged: tuple[str, ...] = ()  # messages about damaged newer checkpoints
    reached: int = 0  # last iteration in metrics.jsonl, possibly later than the checkpoint
    lost: str = ""  # message about missing lines in metrics.jsonl
    has_previous_run: bool = False  # the folder has a previous run that is not resumed

    def lines(self) -> list[str]:
        """Return the messages to print before the start."""
        if self.has_previous_run:
            return [f"starts from scratch: the previous run in {self.folder} is moved aside."]
        since = [f"changed since the earlier start: {change}" for change in self.changes]
        damaged = [f"skipped, because it is damaged: {message}." for message in self.damaged]
        if self.checkpoint is None:
            return since
        completed = CheckpointFolder(self.folder / "checkpoints", None).list_completed()
        later = [path.name for path in completed if parse_step(path) > self.step]
        aside = [f"moves the checkpoints of later iterations aside: {', '.join(later)}."] if later else []
        repeated = f"; the run had reached iteration {self.reached} and repeats those after {self.step}"
        resumes = f"resumes from {self.checkpoint}{repeated if self.reached > self.step else ''}."
        return [*damaged, resumes, *filter(None, [self.lost]), *aside, *since]

    def is_exported(self) -> bool:
        """Return whether the folder `model` was written after the checkpoint."""
        model = self.folder / "model"
        if self.checkpoint is None or not model.is_dir():
            return False
        return model.stat().st_mtime >= (self.checkpoint / PROGRESS).stat().st_mtime

    def claim(self, config: Config | TuningConfig | GenerationConfig | EvolvingConfig) -> Path | None:
        """Prepare the folder: move a previous run aside, remove interrupted saves, save the configuration.

        Returns the new path of the previous run, or None.
        """
        moved = move_aside(self.folder) if self.has_previous_run else None
        checkpoints = CheckpointFolder(self.folder / "checkpoints", keep=None)
        checkpoints.remove_remains()
        if self.checkpoint:
            checkpoints.move_later_aside(self.step)
        newest, number = _find_saved_config(self.folder)
        if newest is None or not _has_results(self.folder):
            save_config(config, self.folder / "config.yaml")
        elif self.changes:
            save_config(config, self.folder / f"config.{number + 1}.yaml")
        return moved


def completed_message(folder: Path, total_steps: int) -> str:
    """Return the message of a run that is already complete."""
    where = f" The model is in {folder / 'model'}." if (folder / "model").is_dir() else ""
    return (
        f"already complete: all {total_steps} iterations are done, nothing was started.{where} To continue training, "
        f"raise trainer.total_training_steps or trainer.total_epochs. Otherwise: {NEW_RUN_HINT}"
    )


def interrupted_message(folder: Path) -> str:
    """Return the message after Ctrl-C or SIGTERM."""
    return f"interrupted{resume_hint(folder)}"


def resume_hint(folder: Path) -> str:
    """Return how to resume a run that has ended, to be appended to the reason in a message."""
    completed = CheckpointFolder(folder / "checkpoints", keep=None).list_completed()
    if not completed:
        return " before the first checkpoint: the same command starts from scratch"
    return f"; with trainer.resume_mode=auto, the default, the same command resumes from {completed[-1]}"


def find_start(config: Config | TuningConfig) -> StartPoint:
    """Find the checkpoint to resume from, according to trainer.resume_mode.

    Raises ValueError if a key has changed that must not change, if trainer.resume_from_path is not a checkpoint, or if
    all checkpoints are damaged.
    """
    trainer, folder = config.trainer, config.trainer.folder
    if trainer.resume_mode == "disable":
        return StartPoint(folder, has_previous_run=folder.exists())
    checkpoint, damaged = _find_undamaged(_find_candidates(config))
    if _has_results(folder):
        changes = find_accepted_changes(config)
        if checkpoint is None:
            return StartPoint(folder, has_previous_run=True)
    elif checkpoint is not None:
        changes = _changes_since_another(checkpoint.resolve().parents[1], config)
    else:
        return StartPoint(folder)
    step, metrics = int(read_progress(checkpoint)["step"]), folder / "metrics.jsonl"
    logged = read_logged_steps(metrics)
    is_own_checkpoint = checkpoint.resolve().parents[1] == folder.resolve()
    every = config.trainer.log_freq if isinstance(config, TuningConfig) else 1
    lost = _describe_lost_metrics(metrics, logged, step, every) if is_own_checkpoint else ""
    return StartPoint(folder, checkpoint, step, tuple(changes), damaged, max(logged, default=0), lost)


def find_start_by_file(config: GenerationConfig | EvolvingConfig, name: str) -> StartPoint:
    """Return the start point of a command that resumes from the file `name` of its folder. Raises ValueError as
    find_accepted_changes does."""
    folder = config.trainer.folder
    if config.trainer.resume_mode == "disable":
        return StartPoint(folder, has_previous_run=folder.exists())
    return StartPoint(folder, changes=tuple(find_accepted_changes(config)) if (folder / name).exists() else ())


def _describe_lost_metrics(metrics: Path, logged: Sequence[int], step: int, every: int) -> str:
    """Return a message if metrics.jsonl lacks lines before iteration `step`, else "".

    every: current interval between lines; it may have been longer at an earlier start.
    """
    steps = [iteration for iteration in logged if iteration <= step]
    last, widest = max(steps, default=0), max((after - before for before, after in pairwise(steps)), default=0)
    if step - last < max(every, widest):
        return ""
    return f"{metrics} has no lines of iterations {last + 1} to {step}; they are lost."


def read_earlier_config(config: Config | TuningConfig) -> dict[str, Any]:
    """Return the newest configuration of the run to resume as plain values; empty for a new run. Raises ValueError as
    find_start does."""
    folder = config.trainer.folder
    if config.trainer.resume_mode == "disable" or not (candidates := _find_candidates(config)):
        return {}
    run = folder if _has_results(folder) else candidates[0].resolve().parents[1]
    return read_saved(run) if _find_saved_config(run)[0] else {}


def _find_candidates(config: Config | TuningConfig) -> list[Path]:
    """Return the checkpoint of trainer.resume_from_path, or the checkpoints of this run, newest first."""
    trainer = config.trainer
    completed = CheckpointFolder(trainer.folder / "checkpoints", keep=None).list_completed()
    if trainer.resume_mode != "resume_path":
        return completed[::-1]
    path = Path(trainer.resume_from_path).expanduser()
    if not (path / PROGRESS).exists():
        available = ", ".join(map(str, completed)) or "none"
        raise ValueError(
            f"trainer.resume_from_path={trainer.resume_from_path!r} is not a complete checkpoint (it has no "
            f"progress.json). Complete checkpoints of this run: {available}."
        )
    return [path]


def _find_undamaged(candidates: Sequence[Path]) -> tuple[Path | None, tuple[str, ...]]:
    """Return the first undamaged checkpoint, and messages about the damaged ones before it. Raises ValueError if all
    are damaged."""
    damaged: list[str] = []
    for checkpoint in candidates:
        if not (messages := find_damage(checkpoint) or find_step_mismatch(checkpoint)):
            return checkpoint, tuple(damaged)
        damaged.append(f"{checkpoint}: {', '.join(messages)}")
    if damaged:
        raise ValueError(f"every checkpoint is damaged: {'; '.join(damaged)}. Restore one. {NEW_RUN_HINT}")
    return None, ()


def find_accepted_changes(config: Config | TuningConfig | GenerationConfig | EvolvingConfig) -> list[Change]:
    """Return the changes since the newest configuration in the run's folder. Raises ValueError if a change is refused,
    the folder belongs to another command, or the configuration cannot be read."""
    folder = config.trainer.folder
    changes = find_changes(_read_same_command(folder, type(config)), config)
    if refused := [change for change in changes if change.verdict == "refused"]:
        raise ValueError(_describe_other_run(folder, refused))
    return changes


def check_same_command(config: EvalConfig) -> None:
    """Raise ValueError if the folder has a run of another command; for commands that always start from scratch."""
    folder = config.trainer.folder
    if _find_saved_config(folder)[0] is not None:
        _read_same_command(folder, type(config))


def _changes_since_another(folder: Path, config: Config | TuningConfig) -> list[Change]:
    """Return the changes since the run in `folder`, which trainer.resume_from_path selects. It may be any run, so no
    change is refused."""
    if _find_saved_config(folder)[0] is None:
        return []
    changes = find_changes(_read_same_command(folder, type(config)), config)
    return [
        replace(change, verdict="applied") if change.verdict == "refused" else change
        for change in changes
        if change.key not in ADDRESS
    ]


def _describe_other_run(folder: Path, refused: Sequence[Change]) -> str:
    differences = ", ".join(
        f"{change.key}={format_value(change.old)} (now {format_value(change.new)})" for change in refused
    )
    completed = CheckpointFolder(folder / "checkpoints", keep=None).list_completed()
    hint = (
        f" To continue from its weights nevertheless, set another trainer.experiment_name with "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={completed[-1]}."
        if completed
        else ""
    )
    return f"{folder} cannot be resumed with these changes: {differences}. {NEW_RUN_HINT}{hint}"


def _has_results(folder: Path) -> bool:
    """Return whether the folder has metrics, results or checkpoints; a failed start leaves none."""
    files = [folder / name for name in ("metrics.jsonl", "results.jsonl", "pool.jsonl")]
    logged = any(file.is_file() and file.stat().st_size for file in files)
    return logged or bool(CheckpointFolder(folder / "checkpoints", keep=None).list_completed())


def _find_saved_config(folder: Path) -> tuple[Path | None, int]:
    """Return path and number of the newest configuration in the folder. config.yaml has number 0."""
    numbers = [int(number) for file in folder.glob("config.*.yaml") if (number := file.name.split(".")[1]).isdigit()]
    if numbers:
        return folder / f"config.{max(numbers)}.yaml", max(numbers)
    first = folder / "config.yaml"
    return (first if first.is_file() else None), 0


def _read_same_command(folder: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """Read the newest configuration in a run's folder. Raises ValueError if it belongs to another command."""
    values = read_saved(folder)
    command = find_command(values)
    if command is not None and COMMANDS[command] is not schema:
        raise ValueError(f"{folder} is the folder of a {command} run. Set another trainer.experiment_name.")
    return values


def read_saved(folder: Path) -> dict[str, Any]:
    """Read the newest configuration in a run's folder, as plain values. Raises ValueError if it cannot be read."""
    path = _find_saved_config(folder)[0] or folder / "config.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{folder} cannot be resumed: its {path.name} cannot be read ({reason}). {NEW_RUN_HINT}"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"{folder} cannot be resumed: its {path.name} has no configuration. {NEW_RUN_HINT}")
    return values
