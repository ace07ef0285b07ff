"""Add the score of a trained reward model to the reward of each trajectory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.config.schema import Config
from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.handles import RewardModelGroup
from alphaapollo.controller.placement import Placement
from alphaapollo.rewards.base import make_failed_score
from alphaapollo.rewards.components import TASK
from alphaapollo.trainer.step.reward_model_tokenizer import RewardModelTokenizer
from alphaapollo.types import Row, Score, TrajectoryGroup

COMPONENT = "reward_model"
"""Name of the reward component with the reward model's score."""


@dataclass
class RewardModelScorer:
    """Scorer that adds the reward model's score to the reward of each trajectory."""

    config: Config
    placement: Placement  # of the reward model's ranks
    padded: bool  # micro-batches are padded to their longest row
    workers: RewardModelGroup
    engines: EngineGroup  # engines whose caches are released while the reward model runs
    tokenizer: RewardModelTokenizer
    is_only_reward: bool  # no reward function and no environment gives a reward
    _num_scored: int = field(default=0, init=False)
    _num_truncated: int = field(default=0, init=False)

    async def score_groups(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Add scores, in place, to all trajectories that have not failed, including greedy baselines."""
        members = [sample for group in groups for sample in (*group.trajectories, group.baseline) if sample is not None]
        members = [sample for sample in members if not sample.score.outcome.failed]
        inputs: dict[int, list[int]] = {}  # token ids that the reward model scores, by index in `members`
        encoded = await asyncio.to_thread(lambda: [self.tokenizer.encode_trajectory(sample) for sample in members])
        for index, token_ids in enumerate(encoded):
            if error := self.tokenizer.find_input_error(token_ids):
                members[index].score = make_failed_score(error)
            else:
                limit = self.tokenizer.max_length
                inputs[index] = token_ids if limit is None else token_ids[-limit:]
                self._num_truncated += len(inputs[index]) < len(token_ids)
        self._num_scored += len(inputs)
        model_scores = await self._compute_scores(list(inputs.values()))
        for index, model_score in zip(inputs, model_scores, strict=True):
            trajectory = members[index]
            score = replace(trajectory.score, accuracy=trajectory.accuracy)
            weight, required = self.config.reward_model.weight, self.config.reward.required
            trajectory.score = add_reward_model_score(score, model_score, weight, required, self.is_only_reward)

    def pop_metrics(self) -> dict[str, float]:
        """Return the share of trajectories, since the last call, that were truncated to reward_model.max_length."""
        share = self._num_truncated / self._num_scored if self._num_scored else 0.0
        self._num_scored = self._num_truncated = 0
        return {"reward_model/truncated": share}

    async def _compute_scores(self, sequences: list[list[int]]) -> list[float]:
        """Compute the reward model's score of each sequence of token ids, at its last token."""
        if not sequences:
            return []
        rows = [Row(ids, [0] * (len(ids) - 1) + [1], [0.0] * len(ids), [len(ids) - 1]) for ids in sequences]
        num_ranks, parallel = self.placement.data_parallel_size, self.placement.sequence_parallel
        max_tokens = self.config.reward_model.forward_max_token_len_per_gpu * parallel
        batch = build_batch_layout(rows, range(len(rows)), num_ranks, len(rows), max_tokens, self.padded)
        async with self.engines.release_kv_cache_temporarily():
            columns = await self.workers.compute_scores(batch.rank_batches)
            await self.workers.offload()
        return [float(value) for value in batch.join_columns(columns)]


def add_reward_model_score(
    score: Score, model_score: float, weight: float, required_components: Iterable[str], is_only_reward: bool
) -> Score:
    """Add the reward model's score to the score of the reward function or environment.

    The new reward is score.reward + weight * model_score, or 0 if a required component is not above 0. The new score
    has the component `reward_model` (model_score) and, unless is_only_reward is true, the components `task`
    (score.reward) and `accuracy`. Returns a failed score if model_score is not finite, or if `score` already has a
    component `reward_model`.
    """
    if not math.isfinite(model_score):
        return make_failed_score(f"the reward model's score is {model_score}")
    parts = score.components
    if COMPONENT in parts:
        return make_failed_score(f"the reward function also returns a component named {COMPONENT}; rename it")
    unmet = [name for name in required_components if parts.get(name, math.inf) <= 0]
    reward = 0.0 if unmet else score.reward + weight * model_score
    if is_only_reward:
        parts = {name: part for name, part in parts.items() if name not in (TASK, "accuracy")}
        return replace(score, reward=reward, components=parts | {COMPONENT: model_score}, accuracy=None)
    accuracy = {} if score.accuracy is None else {"accuracy": score.accuracy}
    return replace(score, reward=reward, components=accuracy | {TASK: score.reward} | parts | {COMPONENT: model_score})
