"""State of the driver that a checkpoint saves (progress.json), and the condition that ends a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alphaapollo.launch.checkpoint_folder import RunProgress


@dataclass
class Progress(RunProgress):
    """The driver's state after `step` complete iterations."""

    prompts_consumed: int = 0  # position in the stream of training prompts; prompts before it have been started
    kl_coef: float = 0.0  # of the KL in the reward, as its controller has set it
    best_accuracy: float | None = None  # over all validations
    validations_without_gain: int = 0  # consecutive ones, since the last reset of the reference
    reference_resets: int = 0
    unfinished: list[int] = field(default_factory=list)
    """Positions before `prompts_consumed` that no iteration has trained on or dropped yet (asynchronous training)."""
    validation: dict[str, float] = field(default_factory=dict)
    """Metrics of the validation of iteration `step`; empty: it had none."""


@dataclass(frozen=True)
class Goal:
    """The iteration or the number of prompts that ends a run."""

    steps: int  # maximum iterations
    prompts: int | None = None  # prompts to consume; None: only iterations count

    @classmethod
    def of(cls, steps: int | None, epochs: int, num_prompts: int, batch_size: int) -> Goal:
        """`steps` iterations or, if None, `epochs` passes over the data.

        The last iteration is then the one that consumes the last full batch of the last pass. With dynamic sampling one
        iteration consumes several batches.
        """
        if steps is not None:
            return cls(steps)
        steps = max(1, num_prompts * epochs // batch_size)
        return cls(steps, steps * batch_size)

    def is_reached(self, progress: Progress, step: int | None = None) -> bool:
        """Whether the run ends after its complete iterations, or after iteration `step`, which has its prompts."""
        done = progress.prompts_consumed - len(progress.unfinished)
        passed = self.prompts is not None and done >= self.prompts
        return passed or (progress.step if step is None else step) >= self.steps


def check_steps(key: str, steps: Sequence[int], total_steps: int) -> None:
    """Raise ValueError if `steps`, the value of `key`, has an iteration beyond the last one of the run."""
    beyond = [step for step in steps if step > total_steps]
    if beyond:
        raise ValueError(
            f"{key}={list(steps)}: iteration {beyond[0]} does not exist, the run has {total_steps} iterations. Use "
            f"numbers from 1 to {total_steps}."
        )
