"""Equivalent layouts of one case, on the real path from trajectories to the workers' columns.

trajectory groups -> build_batch -> [log-probs, values] -> assign_credit -> Columns per rank
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import numpy as np

from alphaapollo.algorithms.advantages import Estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss
from alphaapollo.batching.batch import Columns, MiniBatch
from alphaapollo.batching.packing import filter_mini_batches
from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Config
from alphaapollo.launch.plan import can_skip_rows_without_advantage
from alphaapollo.trainer.step import build_batch as builder
from alphaapollo.trainer.step.build_batch import build_batch
from alphaapollo.trainer.step.credit import assign_credit
from alphaapollo.trainer.step.selection import is_usable_for_training
from alphaapollo.trainer.step.training_batch import TrainingBatch
from tests.invariance.episodes import MAX_LENGTH, Context, Episodes
from tests.matrices import flatten, is_inside, join, split

RUN_SEED, STEP = 5, 3


@dataclass(frozen=True)
class View:
    """Layout of a case."""

    name: str
    context: Context = "append"
    padded: bool = False
    num_ranks: int = 1
    max_tokens: int = 10**6  # token budget of a micro-batch
    order: int | None = None  # shuffle seed of prompts and samples
    resumed: bool = False  # rebuild everything before each optimizer step
    shared: bool = False  # compute prompts once
    skips: bool = False  # skip rows without an advantage, if that changes nothing


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probs and values of models and engine for each sampled token of a case, float32 [T]."""

    old: np.ndarray
    ref: np.ndarray
    values: np.ndarray

    @classmethod
    def draw(cls, generator: np.random.Generator, num_tokens: int) -> TokenLogProbs:
        old = -4.0 + 0.5 * generator.standard_normal(num_tokens)
        ref = old + 0.2 * generator.standard_normal(num_tokens)
        return cls(*(one.astype(np.float32) for one in (old, ref, generator.standard_normal(num_tokens))))


@dataclass(frozen=True)
class Prepared:
    """Input of the ranks, and the token number of each position."""

    batch: TrainingBatch
    columns: list[Columns]  # one per rank
    tokens: np.ndarray  # int64 [B, L], number of each sampled token; -1 elsewhere
    flat_tokens: list[np.ndarray] = field(repr=False)  # the same for each rank, [sum responses]
    steps: list[list[MiniBatch]]  # of each rank's update

    def by_token(self, name: str, num_tokens: int) -> np.ndarray:
        """A column by token number, zeros if no worker needs it. [T]"""
        values, columns = np.zeros(num_tokens), [getattr(one, name) for one in self.columns]
        if columns[0] is None:
            return values
        matrix = join(self.batch.layout, columns)
        values[self.tokens[self.tokens >= 0]] = matrix[self.tokens >= 0]
        return values


def prepare(view: View, episodes: Episodes, logprobs: TokenLogProbs, config: Config, estimator: Estimator) -> Prepared:
    actor = config.actor_rollout_ref.actor.model_copy(update={"ppo_max_token_len_per_gpu": view.max_tokens})
    config = replace_value(config, "actor_rollout_ref.actor", actor)
    config = replace_value(config, "data.max_response_length", MAX_LENGTH)
    config = replace_value(config, "trainer.seed", RUN_SEED)
    order = None if view.order is None else np.random.default_rng(view.order)
    groups = episodes.trajectory_groups(view.context, "greedy_rewards" in estimator.needs, order)
    always_share = partial(builder.build_batch_layout, min_sharing_ratio=0.0)  # even if it saves nothing
    with mock.patch.object(builder, "build_batch_layout", always_share):
        batch = build_batch(
            [group for group in groups if is_usable_for_training(group)],
            config,
            STEP,
            view.num_ranks,
            view.max_tokens,
            view.padded,
            view.shared,
        )
    assert all((rank.rows.shared_prompts is not None) is view.shared for rank in batch.layout.rank_batches)
    tokens = token_numbers(batch, episodes)

    def by_position(values: np.ndarray) -> np.ndarray:
        return flatten(batch.layout, np.where(tokens >= 0, values[tokens.clip(min=0)], np.float32(0)))

    values = by_position(logprobs.values) if "values" in estimator.needs else None
    computed = Columns(
        old_logprobs=by_position(logprobs.old),
        ref_logprobs=by_position(logprobs.ref),
        values=values,
        target_logprobs=by_position(logprobs.ref),
    )
    credit = assign_credit(batch, computed, config, kl_coef=0.1)
    may_skip = view.skips and can_skip_rows_without_advantage(config, get_policy_loss(actor.policy_loss.loss_mode))
    kept = credit.has_gradient if may_skip else np.ones_like(credit.has_gradient)
    steps = filter_mini_batches(batch.layout, kept, view.max_tokens, view.padded)
    return Prepared(batch, credit.columns, tokens, split(batch.layout, tokens), steps)


def token_numbers(batch: TrainingBatch, episodes: Episodes) -> np.ndarray:
    """[B, L]"""
    firsts = episodes.first_tokens()
    tokens = np.full(is_inside(batch.layout).shape, -1, dtype=np.int64)
    for row, owner, numbers in zip(batch.rows, batch.trajectory_ids.tolist(), tokens, strict=True):
        trajectory = batch.trajectories[owner]
        own = firsts[trajectory.prompt_id, trajectory.sample]
        for turn, end in zip(trajectory.turns[row.first_turn :], row.turn_ends, strict=False):
            length, action = len(turn.completion.token_ids), turn.answer_number // 2
            stop = end + 1 - row.response_start
            numbers[stop - length : stop] = own[action] + np.arange(length)
    return tokens
