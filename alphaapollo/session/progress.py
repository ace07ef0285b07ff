"""State of the driver in a checkpoint (progress.json), and the conditions that end a run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from alphaapollo.config.metrics import is_lower_better
from alphaapollo.config.schema.trainer import Training
from alphaapollo.runs.checkpoint_folder import (
    PROGRESS,
    RunProgress,
    check_metric_exists,
    write_progress,
)
from alphaapollo.runs.group_files import read_values, write_values
from alphaapollo.types import TrajectoryGroup
from alphaapollo.utils.disk import explain_damage

PASS_RATES = "pass_rates.npy"
"""File with the pass rate of each prompt in a checkpoint, by prompt id."""
RECENT = "recent_groups.msgpack"
Entries = tuple[tuple[int, TrajectoryGroup], ...]


@dataclass
class CurriculumState:
    """State of the choice of prompts (step/curriculum.py). In a checkpoint, `pass_rates` has its own file."""

    pass_rates: array[float] = field(default_factory=lambda: array("d"))  # by prompt id; NaN: never sampled
    drawn: dict[int, int] = field(default_factory=dict)  # position -> prompt id, of positions in flight
    stage: int = 0  # newest open stage
    stage_start: int = 0  # position in the stream of training prompts at which this stage was opened


@dataclass(frozen=True)
class RecentGroups:
    """Groups that later iterations may train on again (step/collect.py). In a checkpoint, they have their own file."""

    entries: Entries = ()  # (iteration that trained on the group first, group)

    def __deepcopy__(self, memo: dict[int, object]) -> RecentGroups:
        return self  # groups do not change


@dataclass(frozen=True)
class Feedback:
    """Values that the update of an iteration computes for the next one. `Progress` has fields of the same names."""

    kl_coef: float = 0.0
    policy_kl_coef: float | None = None
    baseline: float | None = None
    iterations_skipped: int = 0


@dataclass
class Progress(RunProgress):
    """State of the driver after `step` complete iterations, saved in each checkpoint as progress.json."""

    prompts_consumed: int = 0  # position in the stream of training prompts; prompts before it have been started
    kl_coef: float = 0.0  # current coefficient of the KL penalty in the reward
    policy_kl_coef: float | None = None  # current coefficient of ppo_kl; None: the initial or a fixed one
    baseline: float | None = None  # moving average of returns (adv_estimator=reinforce); None: no earlier iteration
    best_accuracy: float | None = None  # best validation accuracy so far
    validations_without_gain: int = 0  # consecutive validations, counted since the last reference reset
    reference_resets: int = 0
    iterations_skipped: int = 0  # consecutive iterations skipped because of non-finite columns
    unfinished: list[int] = field(default_factory=list)
    """Positions before `prompts_consumed` that no iteration has trained on or dropped yet (asynchronous training)."""
    sampling: dict[str, list[float]] = field(default_factory=dict)
    """Sums of algorithms/surprise.py over the iterations so far."""
    validation: dict[str, float] = field(default_factory=dict)
    """Validation metrics of iteration `step`; empty if it did not validate."""
    curriculum: CurriculumState = field(default_factory=CurriculumState)
    recent: RecentGroups = RecentGroups()

    @property
    def feedback(self) -> Feedback:
        """Values of the last iteration that the next one reads."""
        return Feedback(self.kl_coef, self.policy_kl_coef, self.baseline, self.iterations_skipped)

    def complete_iteration(self, feedback: Feedback, validation: dict[str, float], recent: RecentGroups) -> None:
        """Count an iteration, and store what the next one depends on."""
        values = vars(feedback) | {"step": self.step + 1, "validation": validation, "recent": recent}
        for name, value in values.items():
            setattr(self, name, value)

    def write(self, folder: Path) -> None:
        values = asdict(replace(self, recent=RecentGroups()))
        rates = values["curriculum"].pop("pass_rates")
        values["recent"] = len(self.recent.entries)
        if rates:
            np.save(folder / PASS_RATES, np.array(rates))
        if self.recent.entries:
            write_values(folder / RECENT, self.recent.entries)
        write_progress(folder, values)

    @classmethod
    def read(cls, folder: Path) -> Self:
        progress = super().read(folder)
        state: object = progress.curriculum
        if isinstance(state, dict):
            with explain_damage(folder / PASS_RATES):
                rates = np.load(folder / PASS_RATES) if (folder / PASS_RATES).is_file() else ()
                drawn = {int(position): prompt_id for position, prompt_id in state["drawn"].items()}
                progress.curriculum = CurriculumState(**state | {"pass_rates": array("d", rates), "drawn": drawn})
        recent: object = progress.recent  # number of groups in RECENT; RecentGroups() in files of older versions
        if isinstance(recent, list) and recent:
            raise ValueError(
                f"{folder / PROGRESS} has the groups of data.reuse in a format that is no longer read. Start from "
                "scratch (trainer.resume_mode=disable)."
            )
        has_groups = isinstance(recent, int) and recent > 0
        progress.recent = RecentGroups(read_values(folder / RECENT, Entries) if has_groups else ())
        return progress


@dataclass(frozen=True)
class EarlyStopping:
    """End of a run after `patience` consecutive validations that do not improve a metric by more than `threshold`. The
    progress has the counts, so that a resumed run ends at the same iteration."""

    metric: str | None = None  # None: never
    patience: int = 3
    threshold: float = 0.0

    def observe(self, progress: RunProgress, validation: Mapping[str, float]) -> None:
        """Count a validation; an empty one does not count. Raises ValueError if the first one lacks the metric."""
        if self.metric is None or not validation:
            return
        if progress.compared_metric != self.metric:
            progress.compared_metric, progress.best_value = self.metric, None
            progress.validations_without_improvement = 0
        if progress.best_value is None:
            check_metric_exists("trainer.early_stopping_metric", self.metric, validation)
        value, sign = validation.get(self.metric, math.nan), -1 if is_lower_better(self.metric) else 1
        is_first = progress.best_value is None and math.isfinite(value)
        if is_first or sign * (value - (progress.best_value or 0.0)) > self.threshold:
            progress.best_value, progress.validations_without_improvement = value, 0
        elif progress.best_value is not None:
            progress.validations_without_improvement += 1

    def is_reached(self, progress: RunProgress) -> bool:
        """Whether the run ends."""
        is_counted = self.metric is not None and progress.compared_metric == self.metric
        return is_counted and progress.validations_without_improvement >= self.patience


@dataclass(frozen=True)
class TrainingGoal:
    """Conditions that end a run: a number of iterations or of prompts, or a metric that does not improve."""

    max_steps: int  # iterations, for which schedules are made
    max_prompts: int | None = None  # prompts to consume; None: unlimited
    stop_at_step: int | None = None  # iteration after which this start of the run ends; None: the last one
    early_stopping: EarlyStopping = EarlyStopping()

    @classmethod
    def from_settings(cls, trainer: Training, num_prompts: int, batch_size: int) -> TrainingGoal:
        """Return the goal of a run with `num_prompts` prompts or examples per epoch.

        Without a number of iterations, the run ends after the last full batch of the last epoch. It may then have fewer
        iterations than batches, because dynamic sampling can use several batches in one iteration.
        """
        metric, patience = trainer.early_stopping_metric, trainer.early_stopping_patience
        stopping = EarlyStopping(metric, patience, trainer.early_stopping_threshold)
        if (steps := trainer.total_training_steps) is not None:
            return cls(steps, None, trainer.stop_at_step, stopping)
        steps = max(1, num_prompts * trainer.total_epochs // batch_size)
        return cls(steps, steps * batch_size, trainer.stop_at_step, stopping)

    def is_reached(self, progress: Progress, step: int | None = None) -> bool:
        """Whether the run has ended, or (with `step`) ends after iteration `step`.

        `progress` must already count the prompts of iteration `step`.
        """
        num_finished = progress.prompts_consumed - len(progress.unfinished)
        is_data_used = self.max_prompts is not None and num_finished >= self.max_prompts
        return is_data_used or self.is_last_step(progress, progress.step if step is None else step)

    def is_last_step(self, progress: RunProgress, step: int) -> bool:
        """Whether the run ends after iteration `step`, regardless of the number of consumed prompts."""
        last = min(self.max_steps, self.stop_at_step or self.max_steps)
        return step >= last or self.early_stopping.is_reached(progress)

    def describe_early_end(self, progress: RunProgress) -> str:
        """Return why a run whose goal is reached ended before its last iteration; "" if it did not."""
        if progress.step >= self.max_steps:
            return ""
        if self.early_stopping.is_reached(progress):
            num_validations, best = progress.validations_without_improvement, f"{progress.best_value:.4g}"
            metric = f"{self.early_stopping.metric}, which was best with {best}"
            why = f"{num_validations} validations have not improved {metric} (trainer.early_stopping_patience)"
        elif self.stop_at_step and progress.step >= self.stop_at_step:
            why = f"trainer.stop_at_step={self.stop_at_step}"
        else:
            why = "the end of the data (trainer.total_epochs)"
        return f"the run ended after {progress.step} of {self.max_steps} iterations: {why}"


def check_has_validation_data(trainer: Training, has_data: bool) -> None:
    """Raise ValueError if a key names a validation metric, but there is nothing to validate on."""
    for key in ("keep_best", "early_stopping_metric"):
        if (metric := getattr(trainer, key)) and not has_data:
            raise ValueError(f"trainer.{key}={metric} needs validation data. Set data.val_files.")


def check_steps_within_run(config_key: str, steps: Sequence[int], total_steps: int) -> None:
    """Raise ValueError if the config key lists an iteration that is after the last iteration of the run."""
    beyond = [step for step in steps if step > total_steps]
    if beyond:
        raise ValueError(
            f"{config_key}={list(steps)}: iteration {beyond[0]} does not exist; the run has {total_steps} iterations. "
            f"Use numbers from 1 to {total_steps}."
        )
