"""Where a run stands: all of the driver's state that a checkpoint must hold (progress.json)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path

from alphaapollo.launch.checkpoint_folder import read_progress, write_progress
from alphaapollo.trainer.worth import Worth, worth_of
from alphaapollo.types import TrajectoryGroup


@dataclass
class Progress:
    """The driver's state after `step` whole iterations."""

    step: int = 0
    prompts_consumed: int = 0  # position in the stream of training prompts: those before it have been started
    kl_coef: float = 0.0  # of the KL in the reward, as its controller has set it
    best_accuracy: float | None = None  # of all validations
    validations_without_gain: int = 0  # in a row, since the last reset of the reference
    reference_resets: int = 0
    unfinished: list[int] = field(default_factory=list)
    """Positions before `prompts_consumed` that no iteration has trained on or dropped yet: of an asynchronous run."""
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Mean and standard error of what the weights after an iteration have played (worth.py)."""

    @property
    def worth(self) -> dict[int, Worth]:
        return {int(step): Worth(*figures) for step, figures in self.rewards.items()}

    def note_rewards(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Of an iteration's trajectories."""
        self.rewards = {str(step): [own.mean, own.error] for step, own in worth_of(groups).items()} | self.rewards

    def forget_rewards(self, saved: Collection[int]) -> None:
        """But those of iterations with a checkpoint, and of the newest."""
        newest = max(self.worth, default=0)
        self.rewards = {step: own for step, own in self.rewards.items() if int(step) in saved or int(step) == newest}

    def write(self, folder: Path) -> None:
        write_progress(folder, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Progress:
        fields = read_progress(folder)
        if unknown := fields.keys() - {field.name for field in dataclass_fields(cls)}:
            raise ValueError(
                f"{folder}: its progress has {', '.join(sorted(unknown))}, which this version does not know."
            )
        return cls(**fields)


@dataclass(frozen=True)
class Goal:
    """When a run has done what was asked of it."""

    steps: int  # iterations at most
    prompts: int | None = None  # passes over the data, in prompts consumed; None: the iterations alone count

    @classmethod
    def of(cls, steps: int | None, epochs: int, num_prompts: int, batch_size: int) -> Goal:
        """So many iterations or, where `steps` is None, so many passes: then the iteration in which the last whole
        batch of the last pass is consumed is the last. With dynamic sampling one iteration consumes several batches."""
        if steps is not None:
            return cls(steps)
        steps = max(1, num_prompts * epochs // batch_size)
        return cls(steps, steps * batch_size)

    def reached(self, progress: Progress, step: int | None = None) -> bool:
        """After the whole iterations so far; or after iteration `step`, at work, whose prompts are consumed."""
        done = progress.prompts_consumed - len(progress.unfinished)
        passed = self.prompts is not None and done >= self.prompts
        return passed or (progress.step if step is None else step) >= self.steps


def check_steps(key: str, steps: Sequence[int], total_steps: int) -> None:
    """ValueError for an iteration that the run does not have; `key` names them."""
    beyond = [step for step in steps if step > total_steps]
    if beyond:
        raise ValueError(
            f"{key}={list(steps)}: the run has {total_steps} iterations, so there is none {beyond[0]}. Give numbers "
            f"from 1 to {total_steps}."
        )
