"""All that one training run holds, made by lifecycle.py and handed from station to station."""

from __future__ import annotations

from dataclasses import dataclass

from alphaapollo.algorithms.advantages import Estimator
from alphaapollo.algorithms.kl import KLController
from alphaapollo.config.schema import Config
from alphaapollo.controller.crew import Crew, Trainers
from alphaapollo.data.stream import PromptStream
from alphaapollo.observability.console import Console
from alphaapollo.observability.rollout_log import RolloutLog
from alphaapollo.observability.trackers import Tracker
from alphaapollo.trainer.profile import StepProfiler
from alphaapollo.trainer.progress import Goal, Progress
from alphaapollo.trainer.saving import Saving
from alphaapollo.trainer.setup.plan import Plan
from alphaapollo.trainer.step.credit import ColumnDtype
from alphaapollo.trainer.step.reference_ahead import ReferenceAhead
from alphaapollo.trainer.step.trained_reward import TrainedReward
from alphaapollo.types import Prompt
from alphaapollo.weight_sync.publish import WeightPublisher


@dataclass(kw_only=True)
class Learner:
    """What learning needs, of a run or of a replay (replay.py)."""

    config: Config
    plan: Plan
    crew: Trainers
    estimator: Estimator
    kl_controller: KLController
    progress: Progress
    console: Console
    column_dtype: ColumnDtype = "float32"  # of what the driver computes for the training ranks
    shares_prompts: bool = False  # the plan's, if the workers' self-check allows it
    reference: ReferenceAhead | None = None  # where its log-probs are computed group by group
    left_out: int = 0  # iterations in a row in which nothing was learned, for a worker's numbers were none

    def begin_reference(self) -> None:
        """Where the plan says so, and it is known whether prompts are shared."""
        plan, actor = self.plan, self.config.actor_rollout_ref.actor
        if plan.reference_ahead:
            budget = actor.ppo_max_token_len_per_gpu * plan.placement.sequence_parallel
            ranks, policy = plan.placement.data_parallel, self.crew.policy
            self.reference = ReferenceAhead(policy, ranks, budget, plan.padded, self.shares_prompts)


@dataclass(kw_only=True)
class Run(Learner):
    """All that one run holds. Its state is `progress` and what the workers hold; of the rest `shares_prompts`,
    `reference`, `left_out` and `engines_replaced` outlive an iteration."""

    crew: Crew
    weights: WeightPublisher
    prompts: list[Prompt]
    val_prompts: list[Prompt]
    goal: Goal
    stream: PromptStream
    saving: Saving
    tracker: Tracker
    rollout_log: RolloutLog
    profiler: StepProfiler
    trained_reward: TrainedReward | None = None
    engines_replaced: int = 0  # after their death
