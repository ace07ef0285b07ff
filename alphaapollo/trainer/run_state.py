"""State of a training run. lifecycle.py creates it and passes it to the functions of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from alphaapollo.config.schema import Config
from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import Tracker
from alphaapollo.rollout.suites import Suite
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.session.checkpoints import BackgroundCheckpointWriter
from alphaapollo.session.plan import Plan
from alphaapollo.session.publish import WeightPublisher
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.progress import Progress, TrainingGoal
from alphaapollo.trainer.step.credit import ColumnDtype
from alphaapollo.trainer.step.curriculum import PromptSampler
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer
from alphaapollo.types import Prompt

if TYPE_CHECKING:
    from alphaapollo.trainer.step.learn import LearnFunction


class MetricSource(Protocol):
    """Part of a run that has metrics of its own, such as the reward model's scorer."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call. Called once per iteration."""


@dataclass(kw_only=True)
class LearnerState:
    """Part of the run's state that updating the models needs. A recorded iteration is computed again with it."""

    config: Config
    plan: Plan
    workers: WorkerGroups
    progress: Progress
    console: Console
    column_dtype: ColumnDtype = "float32"  # dtype of the columns that the driver computes
    uses_shared_prompts: bool = False  # prompts are computed once for all their samples


@dataclass(kw_only=True)
class TrainingRun(LearnerState):
    """State of a training run in the driver. A checkpoint saves `progress` and the state of the workers."""

    weights: WeightPublisher
    prompts: list[Prompt]
    val_prompts: list[Prompt]
    val_suites: Sequence[Suite] = ()
    goal: TrainingGoal
    sampler: PromptSampler
    learn: LearnFunction
    checkpoint_writer: BackgroundCheckpointWriter[Progress]
    tracker: Tracker
    rollout_log: RolloutLog
    profiler: StepProfiler
    metric_sources: list[MetricSource]
    reward_model_scorer: RewardModelScorer | None = None
