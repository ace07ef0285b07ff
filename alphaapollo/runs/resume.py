"""Find the checkpoint that a run resumes from, and the configuration changes since the run's last start.

find_start_point only reads. `StartPoint.prepare_folder` changes the folder when the run starts: it moves a previous run
aside if the new run starts from scratch, and saves the plan (run_plan.py) and the configuration. config.yaml is the
configuration of the first start. Each later start with changes saves one more file: config.1.yaml, config.2.yaml, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel

from alphaapollo.config.changes import ConfigChange, find_changes, identify_command
from alphaapollo.config.keys import COMMANDS, format_value
from alphaapollo.config.load import save_config
from alphaapollo.config.renamed_keys import move_renamed_keys
from alphaapollo.config.schema import Config, EvalConfig, InferenceConfig, TuningConfig
from alphaapollo.config.schema.base import CHANGES_DATA
from alphaapollo.runs.checkpoint_folder import (
    NAME,
    PROGRESS,
    CheckpointFolder,
    check_format,
    find_damage,
    list_checkpoints,
    move_aside,
    parse_step,
    read_inputs,
    read_progress,
    write_format,
)
from alphaapollo.runs.input_digests import Digests, RunInputs, compute_input_digests, find_content_changes
from alphaapollo.runs.metrics_file import read_logged_steps
from alphaapollo.runs.run_plan import RunPlan, read_input_digests, write_run_plan
from alphaapollo.utils.disk import read_yaml
from alphaapollo.utils.json_types import JsonObject

TrainingConfig = Config | TuningConfig
ResumableConfig = TrainingConfig | InferenceConfig
FOLDER_KEYS = ("trainer.project_name", "trainer.experiment_name", "trainer.output_dir")
NEW_RUN_HINT = (
    "Set another trainer.experiment_name, or trainer.resume_mode=disable to start from scratch (the previous run is "
    "moved aside)."
)


@dataclass(frozen=True)
class StartPoint:
    """Where a run starts: from a checkpoint or from scratch. Creating this object changes nothing on disk."""

    folder: Path
    checkpoint: Path | None = None
    step: int = 0  # number of completed iterations in the checkpoint
    config_changes: tuple[ConfigChange, ...] = ()  # changes of keys and of files since the earlier start
    damaged_checkpoints: tuple[str, ...] = ()  # messages about damaged newer checkpoints
    last_logged_step: int = 0  # last iteration in metrics.jsonl, possibly later than the checkpoint
    replaces_previous_run: bool = False  # the folder has a previous run, which is moved aside
    inputs: RunInputs = field(default=RunInputs(), compare=False)  # written to plan.json and each checkpoint

    def describe(self) -> list[str]:
        """Return the messages to print before the start, e.g. `resumes from <run>/checkpoints/step_000020.`"""
        if self.replaces_previous_run:
            return [f"starts from scratch: the previous run in {self.folder} is moved aside."]
        changes = [change for change in self.config_changes if change.verdict != "ignored"]
        differences = [f"changed since the earlier start: {change}" for change in changes]
        if self.has_other_data:
            differences.append("the training data has changed: a new order of its rows and new pass rates begin.")
        damaged = [f"skipped, because it is damaged: {message}." for message in self.damaged_checkpoints]
        if self.checkpoint is None:
            return differences
        completed = list_checkpoints(self.folder)
        later = [path.name for path in completed if parse_step(path) > self.step]
        aside = [f"moves the checkpoints of later iterations aside: {', '.join(later)}."] if later else []
        repeated = f"; iterations {self.step + 1} to {self.last_logged_step} are repeated"
        resumes = f"resumes from {self.checkpoint}{repeated if self.last_logged_step > self.step else ''}."
        return [*damaged, resumes, *aside, *differences]

    @property
    def has_other_data(self) -> bool:
        """Whether the training data differs from that of the checkpoint."""
        return any(change.key == "data.train_files" and change.verdict != "ignored" for change in self.config_changes)

    def has_exported_model(self) -> bool:
        """Return whether the run's folder `model` (the exported model) is newer than the checkpoint."""
        model = self.folder / "model"
        if self.checkpoint is None or not model.is_dir():
            return False
        return model.stat().st_mtime >= (self.checkpoint / PROGRESS).stat().st_mtime

    def prepare_folder(self, config: ResumableConfig, plan: RunPlan) -> Path | None:
        """Move a previous run aside, remove interrupted saves, and save configuration and plan. Returns the new path of
        the previous run, or None."""
        moved = move_aside(self.folder) if self.replaces_previous_run else None
        checkpoints = CheckpointFolder(self.folder / "checkpoints", keep=None)
        checkpoints.remove_incomplete()
        if self.checkpoint:
            checkpoints.move_later_checkpoints_aside(self.step)
        newest, number = find_saved_config(self.folder)
        if newest is None or not _has_results(self.folder):
            save_config(config, self.folder / "config.yaml")
        elif self.config_changes:
            save_config(config, self.folder / f"config.{number + 1}.yaml")
        write_run_plan(self.folder, replace(plan, inputs=self.inputs.digests))
        write_format(self.folder)
        return moved


def format_completed_run_message(steps: int, early_end: str) -> str:
    """Return the message for a run that is already complete: it says how to continue training. early_end: why the run
    ended before its last iteration; empty if it did not."""
    change = "change this key" if early_end else "raise trainer.total_training_steps or trainer.total_epochs"
    return (
        f"already complete: {early_end or f'all {steps} iterations are done'}; nothing was started. To continue "
        f"training, {change}. For another run: {NEW_RUN_HINT}"
    )


def resume_hint(folder: Path) -> str:
    """Return a clause that says from where the same command resumes a run that has ended."""
    completed = list_checkpoints(folder)
    if not completed:
        return "no checkpoint was written, so the same command starts from scratch"
    return f"with trainer.resume_mode=auto, the default, the same command resumes from {completed[-1]}"


def find_start_point(config: TrainingConfig, digests: Digests | None = None) -> StartPoint:
    """Find the checkpoint that a training run resumes from, according to trainer.resume_mode.

    digests: those of the inputs that the run has read; None: of the files as they are now. Raises ValueError if a key
    that identifies a run or the training data has changed, or if there are only damaged checkpoints.
    """
    trainer, folder = config.trainer, config.trainer.folder
    inputs = RunInputs(compute_input_digests(config) if digests is None else digests, weights_are_shares=True)
    if trainer.resume_mode == "disable":
        return StartPoint(folder, replaces_previous_run=folder.exists(), inputs=inputs)
    checkpoint, damaged = _find_undamaged_checkpoint(_list_resumable_checkpoints(config))
    earlier = read_inputs(checkpoint) if checkpoint else RunInputs()
    has_results = _has_results(folder)
    if checkpoint is None and not has_results:
        return StartPoint(folder, inputs=inputs)
    run = folder if has_results or checkpoint is None else checkpoint.resolve().parents[1]
    changes = find_config_changes(config, run, earlier.digests, inputs.digests)
    if checkpoint is None:
        return StartPoint(folder, replaces_previous_run=True, inputs=inputs)
    if not earlier.weights_are_shares and not trainer.resume_with_other_data:
        _check_weights_have_changed(config, checkpoint, changes)
    progress, logged = read_progress(checkpoint), read_logged_steps(folder / "metrics.jsonl")
    start = StartPoint(folder, checkpoint, int(progress["step"]), tuple(changes), damaged, max(logged, default=0))
    position = int(progress.get("prompts_consumed") or progress.get("examples_consumed") or 0)
    data_start = position if start.has_other_data else earlier.data_start
    return replace(start, inputs=replace(inputs, data_start=data_start))


def find_inference_start(config: InferenceConfig, results_name: str) -> StartPoint:
    """Return the start point of an evaluation or evolution, which resume if the run has the file `results_name`.
    Raises ValueError if the configuration has changed in a key that identifies the run."""
    folder = config.trainer.folder
    inputs = RunInputs(compute_input_digests(config))
    if config.trainer.resume_mode == "disable":
        return StartPoint(folder, replaces_previous_run=folder.exists(), inputs=inputs)
    check_format(folder)
    earlier, has_results = read_input_digests(folder), (folder / results_name).exists()
    changes = find_config_changes(config, folder, earlier, inputs.digests) if has_results else ()
    return StartPoint(folder, config_changes=tuple(changes), inputs=inputs)


def read_earlier_config(config: ResumableConfig) -> JsonObject:
    """Return the newest saved configuration of the run to resume, as plain values; empty for a new run."""
    folder = run = config.trainer.folder
    if config.trainer.resume_mode == "disable":
        return {}
    if not isinstance(config, InferenceConfig):
        if not (candidates := _list_resumable_checkpoints(config)):
            return {}
        run = folder if _has_results(folder) else candidates[0].resolve().parents[1]
    return read_saved_config(run) if find_saved_config(run)[0] else {}


def _list_resumable_checkpoints(config: TrainingConfig) -> list[Path]:
    """Return only trainer.resume_from_path if resume_mode=resume_path, else this run's checkpoints, newest first."""
    trainer = config.trainer
    completed = list_checkpoints(trainer.folder)
    if trainer.resume_mode != "resume_path":
        return completed[::-1]
    path = Path(trainer.resume_from_path).expanduser()
    check_format(path)
    if not (path / PROGRESS).exists():
        available = ", ".join(map(str, completed)) or "none"
        raise ValueError(
            f"trainer.resume_from_path={trainer.resume_from_path!r} is not a complete checkpoint (it has no "
            f"progress.json). Complete checkpoints of this run: {available}."
        )
    return [path]


def _find_undamaged_checkpoint(candidates: Sequence[Path]) -> tuple[Path | None, tuple[str, ...]]:
    """Return the first undamaged checkpoint and messages about earlier ones. Raises ValueError if all are damaged."""
    damaged: list[str] = []
    for checkpoint in candidates:
        messages = find_damage(checkpoint)
        if not messages and NAME.fullmatch(checkpoint.name):
            step = read_progress(checkpoint)["step"]
            if step != parse_step(checkpoint):  # it was renamed
                messages = [f"it is of iteration {step}"]
        if not messages:
            return checkpoint, tuple(damaged)
        damaged.append(f"{checkpoint}: {', '.join(messages)}")
    if damaged:
        raise ValueError(f"every checkpoint is damaged: {'; '.join(damaged)}. Restore a checkpoint. {NEW_RUN_HINT}")
    return None, ()


def find_config_changes(config: ResumableConfig, folder: Path, earlier: Digests, now: Digests) -> list[ConfigChange]:
    """Return the changes of keys and files since the last start of the run in `folder`, whose inputs had the digests
    `earlier`. Raises ValueError if a changed key identifies the run, unless `folder` is that of another run."""
    is_own_run = folder == config.trainer.folder
    if not is_own_run and find_saved_config(folder)[0] is None:
        return []
    changes = find_changes(_read_config_and_check_command(folder, type(config)), config)
    with_other_data = getattr(config.trainer, "resume_with_other_data", False)
    judged = []
    for change in find_content_changes(config, changes, earlier, now):
        is_allowed = not is_own_run or (with_other_data and change.reason == CHANGES_DATA.reason)
        judged.append(replace(change, verdict="applied") if change.verdict == "refused" and is_allowed else change)
    refused = [change for change in judged if change.verdict == "refused"]
    if refused:
        different = (f"{change.key}={format_value(change.old)} (now {format_value(change.new)})" for change in refused)
        hints = [NEW_RUN_HINT]
        if completed := list_checkpoints(folder):
            hints.append(
                "To continue from its weights nevertheless, set another trainer.experiment_name with "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={completed[-1]}."
            )
        if all(change.reason == CHANGES_DATA.reason for change in refused):
            hints.append("To resume with the changed data, set trainer.resume_with_other_data=true.")
        raise ValueError(f"{folder} cannot be resumed with these changes: {', '.join(different)}. {' '.join(hints)}")
    return judged if is_own_run else [change for change in judged if change.key not in FOLDER_KEYS]


def _check_weights_have_changed(config: TrainingConfig, checkpoint: Path, changes: Sequence[ConfigChange]) -> None:
    weights, key = config.data.source_weights, "data.source_weights"
    if weights and key not in {change.key for change in changes}:
        raise ValueError(
            f"{checkpoint}: {key}={format_value(weights)} were passes over each file per epoch; they are shares of the "
            "trained prompts, which sum to 1. Set the shares in the run's plan.json (% of a batch), or "
            "trainer.resume_with_other_data=true to use these values as shares."
        )


def check_folder_belongs_to_command(config: EvalConfig) -> None:
    """Raise ValueError if the folder has a run of another command. For commands that never resume."""
    folder = config.trainer.folder
    if find_saved_config(folder)[0] is not None:
        _read_config_and_check_command(folder, type(config))


def _has_results(folder: Path) -> bool:
    """Return whether the run's folder has metrics, results or checkpoints. A start that failed leaves none of them."""
    files = [folder / name for name in ("metrics.jsonl", "results.jsonl", "pool.jsonl")]
    has_files = any(file.is_file() and file.stat().st_size for file in files)
    return has_files or bool(list_checkpoints(folder))


def find_saved_config(folder: Path) -> tuple[Path | None, int]:
    """Return path and number of the newest saved configuration of a run: N for config.N.yaml, 0 for config.yaml."""
    numbers = [int(number) for file in folder.glob("config.*.yaml") if (number := file.name.split(".")[1]).isdecimal()]
    newest = max(numbers, default=0)
    path = folder / (f"config.{newest}.yaml" if newest else "config.yaml")
    return (path if path.is_file() else None), newest


def _read_config_and_check_command(folder: Path, schema: type[BaseModel]) -> JsonObject:
    """Read the newest saved configuration. Raises ValueError if the run belongs to another command than `schema`."""
    values = read_saved_config(folder)
    command = identify_command(values)
    if command is not None and COMMANDS[command] is not schema:
        raise ValueError(f"{folder} is the folder of a {command} run. Set another trainer.experiment_name.")
    return values


def read_saved_config(folder: Path) -> JsonObject:
    """Read the newest saved configuration of a run or a recording, as plain values with current names of keys."""
    check_format(folder)
    path = find_saved_config(folder)[0] or folder / "config.yaml"
    try:
        values = read_yaml(path)
        if not isinstance(values, dict):
            raise ValueError("no configuration")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({' '.join(str(error).split())}). {NEW_RUN_HINT}") from error
    move_renamed_keys(values)
    return values
