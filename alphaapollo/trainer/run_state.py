"""State of a training run, created by lifecycle.py and passed to the functions of the loop."""

from __future__ import annotations

from dataclasses import dataclass

from alphaapollo.config.schema import Config
from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.data.stream import PromptStream
from alphaapollo.launch.background_checkpoint import BackgroundCheckpoint
from alphaapollo.observability.console import Console
from alphaapollo.observability.rollout_log import RolloutLog
from alphaapollo.observability.trackers import Tracker
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.progress import Goal, Progress
from alphaapollo.trainer.publish import WeightPublisher
from alphaapollo.trainer.setup.plan import Plan
from alphaapollo.trainer.step.credit import ColumnDtype
from alphaapollo.trainer.step.reference_prefetch import ReferencePrefetcher
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer
from alphaapollo.types import Prompt


@dataclass(kw_only=True)
class Learner:
    """State that `learn` needs, in a run or in a replay."""

    config: Config
    plan: Plan
    workers: WorkerGroups
    progress: Progress
    console: Console
    column_dtype: ColumnDtype = "float32"  # dtype of the columns that the driver computes
    shares_prompts: bool = False  # planned, and allowed by the workers' self-check
    reference: ReferencePrefetcher | None = None  # None: reference log-probs are computed per batch
    iterations_skipped: int = 0  # consecutive iterations skipped because of non-finite columns

    def start_reference_prefetch(self) -> None:
        """Create the reference prefetcher if it is planned. Set `shares_prompts` before."""
        plan, actor = self.plan, self.config.actor_rollout_ref.actor
        if plan.reference_ahead:
            budget = actor.ppo_max_token_len_per_gpu * plan.placement.sequence_parallel
            ranks, policy = plan.placement.data_parallel, self.workers.policy
            self.reference = ReferencePrefetcher(policy, ranks, budget, plan.padded, self.shares_prompts)


@dataclass(kw_only=True)
class TrainingRun(Learner):
    """State of a run with engines and outputs. A checkpoint saves `progress` and the state of the workers."""

    weights: WeightPublisher
    prompts: list[Prompt]
    val_prompts: list[Prompt]
    goal: Goal
    stream: PromptStream
    saving: BackgroundCheckpoint[Progress]
    tracker: Tracker
    rollout_log: RolloutLog
    profiler: StepProfiler
    reward_model_scorer: RewardModelScorer | None = None
    engines_replaced: int = 0  # number of dead engines that were replaced
