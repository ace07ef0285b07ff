"""Start point of a run: the checkpoint to resume from, and the configuration changes since it was written.

find_start only reads. `StartPoint.claim` prepares the folder when the run starts: it moves a previous run aside if the
new one starts from scratch, and saves the configuration. config.yaml is that of the first start; config.1.yaml,
config.2.yaml, ... are those of resumes that changed something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    """Where a run starts. Nothing has been changed yet."""

    folder: Path
    checkpoint: Path | None = None
    step: int = 0  # completed iterations in the checkpoint
    changes: tuple[Change, ...] = ()
    damaged: tuple[str, ...] = ()  # problems of newer checkpoints
    reached: int = 0  # last iteration in the run's metrics, maybe after the checkpoint
    lost: str = ""  # message about missing lines of its metrics
    has_previous_run: bool = False  # the folder has a previous run that is not resumed
    found: frozenset[str] = field(init=False)  # paths in the folder

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", _list_paths(self.folder))

    def lines(self) -> list[str]:
        """Messages to print before the start."""
        if self.has_previous_run:
            return [f"starts from scratch: the previous run in {self.folder} is moved aside."]
        since = [f"changed since the earlier start: {change}" for change in self.changes]
        damaged = [f"skipped, because it is damaged: {problem}." for problem in self.damaged]
        if self.checkpoint is None:
            return since
        whole = CheckpointFolder(self.folder / "checkpoints", None).list_completed()
        later = [path.name for path in whole if parse_step(path) > self.step]
        aside = [f"moves the checkpoints of later iterations aside: {', '.join(later)}."] if later else []
        beyond = f"; the run had reached iteration {self.reached} and repeats those after {self.step}"
        resumes = f"resumes from {self.checkpoint}{beyond if self.reached > self.step else ''}."
        return [*damaged, resumes, *filter(None, [self.lost]), *aside, *since]

    def is_exported(self) -> bool:
        """Whether the folder `model` was written after the checkpoint."""
        model = self.folder / "model"
        if self.checkpoint is None or not model.is_dir():
            return False
        return model.stat().st_mtime >= (self.checkpoint / PROGRESS).stat().st_mtime

    def claim(self, config: Config | TuningConfig | GenerationConfig | EvolvingConfig) -> Path | None:
        """Move a previous run aside that is not resumed, remove interrupted saves, and save the configuration. Returns
        the new folder of the previous run.

        Raises:
            ValueError: another run has written to the folder meanwhile.
        """
        if new := sorted(_list_paths(self.folder) ^ self.found):
            raise ValueError(
                f"{self.folder} has changed since the start ({', '.join(new[:3])}): another run has written there. Run "
                "the command again, or set another trainer.experiment_name."
            )
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
    """Message of a run that has no iteration left."""
    where = f" The model is in {folder / 'model'}." if (folder / "model").is_dir() else ""
    return (
        f"already complete: all {total_steps} iterations are done, nothing was started.{where} To continue training, "
        f"raise trainer.total_training_steps or trainer.total_epochs. Otherwise: {NEW_RUN_HINT}"
    )


def interrupted_message(folder: Path) -> str:
    """Message after Ctrl-C or SIGTERM."""
    return f"interrupted{resume_hint(folder)}"


def resume_hint(folder: Path) -> str:
    """How to resume a run that has ended; follows the reason of its end in a message."""
    whole = CheckpointFolder(folder / "checkpoints", keep=None).list_completed()
    if not whole:
        return " before the first checkpoint: the same command starts from scratch"
    return f"; with trainer.resume_mode=auto, the default, the same command resumes from {whole[-1]}"


def find_start(config: Config | TuningConfig) -> StartPoint:
    """Find the checkpoint to resume from, by trainer.resume_mode.

    Raises:
        ValueError: the folder is another run's (a changed key is refused), there is no such checkpoint, or
            all are damaged.
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
    own = checkpoint.resolve().parents[1] == folder.resolve()
    every = config.trainer.log_freq if isinstance(config, TuningConfig) else 1
    lost = _describe_lost_metrics(metrics, logged, step, every) if own else ""
    return StartPoint(folder, checkpoint, step, tuple(changes), damaged, max(logged, default=0), lost)


def find_start_by_file(config: GenerationConfig | EvolvingConfig, name: str) -> StartPoint:
    """Start point of a command that resumes from one file of its folder. Raises ValueError as find_accepted_changes does."""
    folder = config.trainer.folder
    if config.trainer.resume_mode == "disable":
        return StartPoint(folder, has_previous_run=folder.exists())
    return StartPoint(folder, changes=tuple(find_accepted_changes(config)) if (folder / name).exists() else ())


def _describe_lost_metrics(metrics: Path, logged: Sequence[int], step: int, every: int) -> str:
    """Message about missing lines before the checkpoint of iteration `step`. A line is written every `every` iterations
    now; at an earlier start the interval may have been longer."""
    steps = [one for one in logged if one <= step]
    last, widest = max(steps, default=0), max((after - before for before, after in pairwise(steps)), default=0)
    if step - last < max(every, widest):
        return ""
    return f"{metrics} has no lines of iterations {last + 1} to {step}; they are lost."


def read_earlier_config(config: Config | TuningConfig) -> dict[str, Any]:
    """The newest configuration of the run that this one resumes, as plain values; empty for a new run. Raises
    ValueError as find_start does."""
    folder = config.trainer.folder
    if config.trainer.resume_mode == "disable" or not (candidates := _find_candidates(config)):
        return {}
    home = folder if _has_results(folder) else candidates[0].resolve().parents[1]
    return read_saved(home) if _find_saved_config(home)[0] else {}


def _find_candidates(config: Config | TuningConfig) -> list[Path]:
    """The checkpoint of resume_from_path, or those of this run, the newest first."""
    trainer = config.trainer
    whole = CheckpointFolder(trainer.folder / "checkpoints", keep=None).list_completed()
    if trainer.resume_mode != "resume_path":
        return whole[::-1]
    asked = Path(trainer.resume_from_path).expanduser()
    if not (asked / PROGRESS).exists():
        have = ", ".join(map(str, whole)) or "none"
        raise ValueError(
            f"trainer.resume_from_path={trainer.resume_from_path!r} is not a complete checkpoint (it has no "
            f"progress.json). Complete checkpoints of this run: {have}."
        )
    return [asked]


def _find_undamaged(candidates: Sequence[Path]) -> tuple[Path | None, tuple[str, ...]]:
    """The first checkpoint that is not damaged, and the problems of those before it."""
    damaged: list[str] = []
    for checkpoint in candidates:
        if not (problems := find_damage(checkpoint) or find_step_mismatch(checkpoint)):
            return checkpoint, tuple(damaged)
        damaged.append(f"{checkpoint}: {', '.join(problems)}")
    if damaged:
        raise ValueError(f"every checkpoint is damaged: {'; '.join(damaged)}. Restore one. {NEW_RUN_HINT}")
    return None, ()


def find_accepted_changes(config: Config | TuningConfig | GenerationConfig | EvolvingConfig) -> list[Change]:
    """What differs from the newest configuration in the run's folder. ValueError: a change that is refused, a
    folder of another command, or no configuration that can be read."""
    folder = config.trainer.folder
    changes = find_changes(_read_same_command(folder, type(config)), config)
    if refused := [change for change in changes if change.verdict == "refused"]:
        raise ValueError(_describe_other_run(folder, refused))
    return changes


def check_same_command(config: EvalConfig) -> None:
    """For a command that starts from scratch each time. ValueError: the folder has a run of another command."""
    folder = config.trainer.folder
    if _find_saved_config(folder)[0] is not None:
        _read_same_command(folder, type(config))


def _changes_since_another(folder: Path, config: Config | TuningConfig) -> list[Change]:
    """Changes since the run in `folder`; its checkpoint was given by path: it may be any run, so nothing is
    refused."""
    if _find_saved_config(folder)[0] is None:
        return []
    changes = find_changes(_read_same_command(folder, type(config)), config)
    return [
        replace(change, verdict="applied") if change.verdict == "refused" else change
        for change in changes
        if change.key not in ADDRESS
    ]


def _describe_other_run(folder: Path, refused: Sequence[Change]) -> str:
    differences = ", ".join(f"{one.key}={format_value(one.old)} (now {format_value(one.new)})" for one in refused)
    whole = CheckpointFolder(folder / "checkpoints", keep=None).list_completed()
    another = (
        f" To continue from its weights nevertheless, set another trainer.experiment_name with "
        f"trainer.resume_mode=resume_path trainer.resume_from_path={whole[-1]}."
        if whole
        else ""
    )
    return f"{folder} cannot be resumed with these changes: {differences}. {NEW_RUN_HINT}{another}"


def _has_results(folder: Path) -> bool:
    """Whether it has more than a failed start leaves."""
    files = [folder / name for name in ("metrics.jsonl", "results.jsonl", "pool.jsonl")]
    logged = any(file.is_file() and file.stat().st_size for file in files)
    return logged or bool(CheckpointFolder(folder / "checkpoints", keep=None).list_completed())


def _list_paths(folder: Path) -> frozenset[str]:
    files = (*folder.glob("*"), *folder.glob("checkpoints/*"))
    return frozenset(str(file.relative_to(folder)) for file in files)


def _find_saved_config(folder: Path) -> tuple[Path | None, int]:
    """The newest configuration in the folder, and its number: 0 for config.yaml."""
    numbers = [int(number) for file in folder.glob("config.*.yaml") if (number := file.name.split(".")[1]).isdigit()]
    if numbers:
        return folder / f"config.{max(numbers)}.yaml", max(numbers)
    first = folder / "config.yaml"
    return (first if first.is_file() else None), 0


def _read_same_command(folder: Path, schema: type[BaseModel]) -> dict[str, Any]:
    """As read_saved. ValueError also for a run of another command."""
    values = read_saved(folder)
    command = find_command(values)
    if command is not None and COMMANDS[command] is not schema:
        raise ValueError(f"{folder} is the folder of a {command} run. Set another trainer.experiment_name.")
    return values


def read_saved(folder: Path) -> dict[str, Any]:
    """The newest configuration in a run's folder, as plain values. ValueError: it cannot be read."""
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
