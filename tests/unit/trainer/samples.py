"""Small trajectories and batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from alphaapollo.batching.batch import Columns
from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Actor, Algorithm, Config
from alphaapollo.planning.memory_fit import get_max_tokens
from alphaapollo.trainer.step.build_batch import build_batch
from alphaapollo.trainer.step.credit import AssignedCredit, assign_credit
from alphaapollo.trainer.step.training_batch import TrainingBatch
from alphaapollo.types import EpisodeEnd, Outcome, Score, Trajectory, TrajectoryGroup
from tests.builders import make_group, make_trajectory, make_turn
from tests.matrices import join

group = make_group


def trajectory(
    sample: int, reward: float, length: int, outcome: Outcome = Outcome.SCORED, valid: bool = True
) -> Trajectory:
    """A prompt of two tokens and one turn of `length` tokens."""
    score = Score(reward, {"accuracy": reward}, outcome)
    return make_trajectory(make_turn(length, valid=valid), score=score, sample=sample)


def played(steps: list[float], score: Score, end: EpisodeEnd = EpisodeEnd.DONE, sample: int = 0) -> Trajectory:
    """An episode of one-token turns with these step rewards; append context, two tokens between the turns."""
    return make_trajectory(*(make_turn(1, reward=step) for step in steps), score=score, sample=sample, end=end)


def build(
    groups: list[TrajectoryGroup], actor: Actor | None = None, num_ranks: int = 1, **algorithm: Any
) -> TrainingBatch:
    """A batch for any estimator: also with turns."""
    actor = actor or Actor(shuffle=False)
    config = replace_value(
        make_config(actor, **{"adv_estimator": "turn_group"} | algorithm), "data.max_response_length", 100
    )
    return build_batch(groups, config, 1, num_ranks, get_max_tokens(actor.ppo_max_token_len_per_gpu), False, False)


def make_config(actor: Actor, **algorithm: Any) -> Config:
    config = replace_value(Config(), "algorithm", Algorithm(**algorithm))
    return replace_value(config, "actor_rollout_ref.actor", actor)


def credit_of(
    batch: TrainingBatch,
    estimator: str,
    computed: Columns[np.ndarray] | None = None,
    actor: Actor | None = None,
    kl_coef: float = 0.0,
    **algorithm: Any,
) -> AssignedCredit:
    config = make_config(actor or Actor(), **algorithm | {"adv_estimator": estimator})
    return assign_credit(batch, computed or Columns(), config, kl_coef)


def matrix_of(batch: TrainingBatch, credit: AssignedCredit, name: str = "advantages") -> np.ndarray:
    """A column of all ranks. [B, L]"""
    return join(batch.layout, [getattr(columns, name) for columns in credit.columns])
