"""State of a training run. lifecycle.py creates it and passes it to the functions of the loop."""

from __future__ import annotations

from dataclasses import dataclass

from alphaapollo.config.schema import Config
from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.data.stream import PromptStream
from alphaapollo.launch.background_checkpoint import BackgroundCheckpointWriter
from alphaapollo.observability.console import Console
from alphaapollo.observability.trackers import Tracker
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.progress import Progress, TrainingGoal
from alphaapollo.trainer.publish import WeightPublisher
from alphaapollo.trainer.setup.plan import Plan
from alphaapollo.trainer.step.credit import ColumnDtype
from alphaapollo.trainer.step.curriculum import CurriculumSampler
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer
from alphaapollo.types import Prompt


@dataclass(kw_only=True)
class LearnerState:
    """Part of the run's state that updating the models needs, in a run and in a replay of a recorded iteration."""

    config: Config
    plan: Plan
    workers: WorkerGroups
    progress: Progress
    console: Console
    column_dtype: ColumnDtype = "float32"  # dtype of the columns that the driver computes
    shares_prompts: bool = False  # prompts are computed once for all their samples


@dataclass(kw_only=True)
class TrainingRun(LearnerState):
    """State of a training run in the driver. A checkpoint saves `progress` and the state of the workers."""

    weights: WeightPublisher
    prompts: list[Prompt]
    val_prompts: list[Prompt]
    goal: TrainingGoal
    stream: PromptStream
    saving: BackgroundCheckpointWriter[Progress]
    tracker: Tracker
    rollout_log: RolloutLog
    profiler: StepProfiler
    curriculum: CurriculumSampler | None = None  # None: prompts are chosen by `stream`
    reward_model_scorer: RewardModelScorer | None = None
    engines_replaced: int = 0  # number of dead engines that were replaced
