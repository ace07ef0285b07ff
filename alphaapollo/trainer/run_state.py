"""State of a training run. lifecycle.py creates it and passes it to the functions of the loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from alphaapollo.config.schema import Config
from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.launch.plan import Plan
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import Timer
from alphaapollo.rollout.suites import Suite
from alphaapollo.session.progress import Progress, TrainingGoal
from alphaapollo.session.training import PolicySession
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.step.credit import ColumnDtype
from alphaapollo.trainer.step.curriculum import PromptSampler
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer
from alphaapollo.trainer.step.update_result import UpdateResult
from alphaapollo.types import Prompt, TrajectoryGroup


class MetricSource(Protocol):
    """Part of a run that has metrics of its own, such as the reward model's scorer."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call. Called once per iteration."""


@dataclass(kw_only=True)
class LearnerState:
    """Part of a run's state that an update of the models needs, also when a recorded iteration is computed again."""

    config: Config
    plan: Plan
    workers: WorkerGroups
    progress: Progress
    console: Console
    column_dtype: ColumnDtype = "float32"  # dtype of the columns that the driver computes
    uses_shared_prompts: bool = False  # each prompt is computed once for all its samples


@dataclass(kw_only=True)
class TrainingRun(LearnerState):
    """State of a training run in the driver. A checkpoint saves `progress` and the state of the workers."""

    session: PolicySession
    prompts: list[Prompt]
    val_prompts: list[Prompt]
    val_suites: Sequence[Suite] = ()
    goal: TrainingGoal
    sampler: PromptSampler
    learn: LearnFunction
    profiler: StepProfiler
    metric_sources: list[MetricSource]
    reward_model_scorer: RewardModelScorer | None = None


LearnFunction = Callable[[TrainingRun, int, list[TrajectoryGroup], Timer], Awaitable[UpdateResult]]
"""`learn`, or `learn` with a recorder around it."""
