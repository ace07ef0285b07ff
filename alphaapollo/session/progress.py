"""State of the driver in a checkpoint (progress.json), and the condition that ends a run."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from alphaapollo.runs.checkpoint_folder import RunProgress, write_progress
from alphaapollo.runs.group_files import read_pickle, write_pickle
from alphaapollo.types import TrajectoryGroup

PASS_RATES = "pass_rates.npy"
"""File with the pass rate of each prompt in a checkpoint, by prompt id."""
RECENT = "recent_groups.pickle"


@dataclass
class CurriculumState:
    """State of the choice of prompts (step/curriculum.py). In a checkpoint, `pass_rates` has its own file."""

    pass_rates: array[float] = field(default_factory=lambda: array("d"))  # by prompt id; NaN: never sampled
    drawn: dict[int, int] = field(default_factory=dict)  # position -> prompt id, of positions in flight
    stage: int = 0  # newest open stage
    stage_start: int = 0  # first position of the run that was drawn with it


@dataclass(frozen=True)
class RecentGroups:
    """Groups that later iterations may train on again (step/collect.py). In a checkpoint, they have their own file."""

    entries: tuple[tuple[int, TrajectoryGroup], ...] = ()  # (iteration that trained on the group first, group)

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
            write_pickle(folder / RECENT, self.recent.entries)
        write_progress(folder, values)

    @classmethod
    def read(cls, folder: Path) -> Self:
        progress = super().read(folder)
        state: object = progress.curriculum
        if isinstance(state, dict):
            rates = np.load(folder / PASS_RATES) if (folder / PASS_RATES).is_file() else ()
            drawn = {int(position): prompt_id for position, prompt_id in state["drawn"].items()}
            progress.curriculum = CurriculumState(array("d", rates), drawn, state["stage"], state.get("stage_start", 0))
        recent: object = progress.recent  # the number of groups; the default if an earlier version wrote the file
        if isinstance(recent, list) and recent:
            raise ValueError(f"{folder} has groups for data.reuse in a format that only alphaapollo 0.2.0 reads.")
        progress.recent = RecentGroups(read_pickle(folder / RECENT) if isinstance(recent, int) and recent else ())
        return progress


@dataclass(frozen=True)
class TrainingGoal:
    """Condition that ends a run: a number of iterations, or a number of prompts."""

    max_steps: int  # iterations
    max_prompts: int | None = None  # prompts to consume; None: unlimited

    @classmethod
    def from_schedule(cls, steps: int | None, epochs: int, num_prompts: int, batch_size: int) -> TrainingGoal:
        """Return the goal for `steps` iterations or, if None, for `epochs` passes over `num_prompts` prompts.

        The run ends after the last full batch of the last pass. It may then have fewer iterations than batches, because
        dynamic sampling can use several batches in one iteration.
        """
        if steps is not None:
            return cls(steps)
        steps = max(1, num_prompts * epochs // batch_size)
        return cls(steps, steps * batch_size)

    def is_reached(self, progress: Progress, step: int | None = None) -> bool:
        """Whether the run has ended, or (with `step`) ends after iteration `step`.

        `progress` must already count the prompts of iteration `step`.
        """
        done = progress.prompts_consumed - len(progress.unfinished)
        passed = self.max_prompts is not None and done >= self.max_prompts
        return passed or (progress.step if step is None else step) >= self.max_steps


def check_steps_within_run(config_key: str, steps: Sequence[int], total_steps: int) -> None:
    """Raise ValueError if the config key lists an iteration that is after the last iteration of the run."""
    beyond = [step for step in steps if step > total_steps]
    if beyond:
        raise ValueError(
            f"{config_key}={list(steps)}: iteration {beyond[0]} does not exist; the run has {total_steps} iterations. "
            f"Use numbers from 1 to {total_steps}."
        )
