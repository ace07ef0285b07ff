"""Small trajectories, groups and batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Actor, Algorithm, Config
from alphaapollo.launch.memory.fit import get_max_tokens
from alphaapollo.trainer.step.credit import AssignedCredit, WorkerOutputs, assign_credit
from alphaapollo.trainer.step.training_batch import Batch, build_batch
from alphaapollo.types import (
    Completion,
    EpisodeEnd,
    Outcome,
    Prompt,
    Row,
    Score,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from tests.matrices import join


def trajectory(
    sample: int, reward: float, length: int, outcome: Outcome = Outcome.SCORED, valid: bool = True, version: int = 0
) -> Trajectory:
    """A prompt of two tokens and one turn of `length` tokens."""
    actions = list(range(length))
    completion = Completion(actions, [-0.5] * length, StopReason.STOP, weight_version=version)
    row = Row([7, 8, *actions], [0, 0] + [1] * length, [0.0, 0.0] + [-0.5] * length, turn_ends=[1 + length])
    return Trajectory(
        prompt_id=0,
        sample=sample,
        turns=[Turn([7, 8], completion, "text", valid=valid)],
        rows=[row] if length else [],
        score=Score(reward, {"accuracy": reward}, outcome),
        end=EpisodeEnd.DONE,
    )


def group(*trajectories: Trajectory, baseline: Trajectory | None = None, **extra_info: Any) -> TrajectoryGroup:
    return TrajectoryGroup(Prompt(0, "test", "text", extra_info=extra_info), list(trajectories), baseline)


def build(
    groups: list[TrajectoryGroup],
    actor: Actor | None = None,
    num_ranks: int = 1,
    **algorithm: Any,
) -> Batch:
    actor = actor or Actor(shuffle=False)
    config = replace_value(make_config(actor, **algorithm), "data.max_response_length", 100)
    max_tokens = get_max_tokens(actor.ppo_max_token_len_per_gpu)
    return build_batch(
        groups, config, step=1, num_ranks=num_ranks, max_tokens=max_tokens, padded=False, share_prompts=False
    )


def make_config(actor: Actor, **algorithm: Any) -> Config:
    config = replace_value(Config(), "algorithm", Algorithm(**algorithm))
    return replace_value(config, "actor_rollout_ref.actor", actor)


def credit_of(
    batch: Batch,
    estimator: str,
    computed: WorkerOutputs | None = None,
    actor: Actor | None = None,
    kl_coef: float = 0.0,
    **algorithm: Any,
) -> AssignedCredit:
    config = make_config(actor or Actor(), **algorithm | {"adv_estimator": estimator})
    return assign_credit(batch, computed or WorkerOutputs(), config, kl_coef)


def matrix_of(batch: Batch, credit: AssignedCredit, name: str = "advantages") -> np.ndarray:
    """A column of all ranks. [B, L]"""
    return join(batch.layout, [getattr(columns, name) for columns in credit.columns])


def played(steps: list[float], score: Score, end: EpisodeEnd = EpisodeEnd.DONE, sample: int = 0) -> Trajectory:
    """An episode of one-token turns with these step rewards; append context, two tokens between the turns."""
    turns = [Turn([7, 7], Completion([1], [-0.1], StopReason.STOP, 0), "a", reward=step) for step in steps]
    size = 3 * len(steps)
    ends = list(range(2, size, 3))
    row = Row([7, 7, 1] * len(steps), [0, 0, 1] * len(steps), [0.0] * size, ends)
    return Trajectory(0, sample, turns, [row], score, end)
