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
    """What `learn` needs, in a run or in a replay."""

    config: Config
    plan: Plan
    workers: WorkerGroups
    progress: Progress
    console: Console
    column_dtype: ColumnDtype = "float32"  # of what the driver computes for the training ranks
    shares_prompts: bool = False  # as planned, if the self-check of the workers allows it
    reference: ReferencePrefetcher | None = None  # if its log-probs are computed per group
    iterations_skipped: int = 0  # consecutive ones, because of non-finite worker columns

    def start_reference_prefetch(self) -> None:
        """Create the prefetcher if it is planned; `shares_prompts` must be known."""
        plan, actor = self.plan, self.config.actor_rollout_ref.actor
        if plan.reference_ahead:
            budget = actor.ppo_max_token_len_per_gpu * plan.placement.sequence_parallel
            ranks, policy = plan.placement.data_parallel, self.workers.policy
            self.reference = ReferencePrefetcher(policy, ranks, budget, plan.padded, self.shares_prompts)


@dataclass(kw_only=True)
class TrainingRun(Learner):
    """A run with its engines and outputs. Its resumable state is `progress` and the state of the workers."""

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
    engines_replaced: int = 0  # after their death
