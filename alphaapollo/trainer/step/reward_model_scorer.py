"""Scores of a trained reward model as part of the reward.

groups -> token ids of each trajectory -> batch -> workers -> one score each -> Score with the component `reward_model`
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from alphaapollo.algorithms.advantages.none import NO_ESTIMATOR
from alphaapollo.config.schema import Config, Model, RewardModel
from alphaapollo.controller.handles import EngineGroup, RewardModelGroup
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.models.load import find_reward_model_class, load_config
from alphaapollo.rewards.base import make_failed_score
from alphaapollo.rewards.components import TASK
from alphaapollo.rewards.registry import is_gradable
from alphaapollo.types import Message, Prompt, Row, Score, Trajectory, TrajectoryGroup

COMPONENT = "reward_model"
"""Component of a score."""


@dataclass(frozen=True)
class RewardModelTokenizer:
    """Tokens of a trajectory for the reward model.

    With the policy's tokens and chat template they are the trajectory's last row, as the engine saw it. Otherwise its
    only turn is rendered again, as a chat or text.
    """

    renderer: Renderer  # the reward model's
    shares_tokens: bool
    max_length: int | None  # the last tokens that are read; None: all
    vocabulary: int

    def describe(self, config: RewardModel, has_function: bool) -> str:
        """Entry of the plan."""
        function = "the reward function + " if has_function else ""
        text = "the policy's tokens" if self.shares_tokens else "chats in its own template"
        limit = "" if self.max_length is None else f", the last {self.max_length}"
        return f"{function}{config.weight:g} x the reward model's score (of {text}{limit}): {config.model.path}"

    def encode_all(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """All tokens of each trajectory, not truncated; empty for one without rows."""
        return [self.encode(trajectory) if trajectory.rows else [] for trajectory in trajectories]

    def encode(self, trajectory: Trajectory) -> list[int]:
        if self.shares_tokens:
            return self.renderer.append_turn_end(list(trajectory.rows[-1].token_ids))
        asked, answer = trajectory.first_observation, trajectory.turns[-1].text
        assert asked is not None and len(trajectory.turns) == 1, "make_reward_model_tokenizer refuses several turns"
        if isinstance(asked, str):
            return self.renderer.encode([asked + answer], add_special_tokens=True)[0]
        return self.renderer.encode(
            [self.renderer.render_chat(_add_answer(asked, answer), add_generation_prompt=False)]
        )[0]

    def find_input_error(self, token_ids: list[int]) -> str | None:
        """Why the reward model cannot score these tokens."""
        if len(token_ids) < 2:
            return "there is no text to score"
        if max(token_ids) >= self.vocabulary:
            return f"token {max(token_ids)} is not in the reward model's vocabulary of {self.vocabulary}"
        return None


@dataclass
class RewardModelScorer:
    """Adds the reward model's score to trajectories as they arrive from the engines."""

    group: RewardModelGroup
    engines: EngineGroup  # their caches are released while the reward model works
    tokenizer: RewardModelTokenizer
    num_ranks: int  # data-parallel ranks
    max_tokens: int  # of a micro-batch
    padded: bool
    weight: float
    required: Sequence[str]  # components that must be above 0, or the total reward is 0
    alone: bool  # there is no reward function
    _scored: int = field(default=0, init=False)
    _truncated: int = field(default=0, init=False)

    async def score_groups(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Score every trajectory that has not failed, greedy baselines included, in place."""
        members = [one for group in groups for one in (*group.trajectories, group.baseline) if one is not None]
        members = [one for one in members if not one.score.outcome.failed]
        readable: dict[int, list[int]] = {}
        for index, token_ids in enumerate(await asyncio.to_thread(self.tokenizer.encode_all, members)):
            if problem := self.tokenizer.find_input_error(token_ids):
                members[index].score = make_failed_score(problem)
            else:
                limit = self.tokenizer.max_length
                readable[index] = token_ids if limit is None else token_ids[-limit:]
                self._truncated += len(readable[index]) < len(token_ids)
        self._scored += len(readable)
        values = await self._compute_scores(list(readable.values()))
        for index, value in zip(readable, values, strict=True):
            one = members[index]
            own = replace(one.score, components={"accuracy": one.accuracy} | one.score.components)
            one.score = add_model_score(own, value, self.weight, self.required, self.alone)

    def take_metrics(self) -> dict[str, float]:
        """Share of texts truncated to reward_model.max_length, since the last call."""
        share = self._truncated / self._scored if self._scored else 0.0
        self._scored = self._truncated = 0
        return {"reward_model/truncated": share}

    async def _compute_scores(self, texts: list[list[int]]) -> list[float]:
        """Scores of the texts. Their response is the last token, where the score is read."""
        if not texts:
            return []
        rows = [Row(ids, [0] * (len(ids) - 1) + [1], [0.0] * len(ids), [len(ids) - 1]) for ids in texts]
        batch = build_train_batch(
            rows, range(len(rows)), self.num_ranks, len(rows), self.max_tokens, self.padded, seed=0, shuffle=False
        )
        async with self.engines.cache_released():
            columns = await self.group.compute_scores(batch.rank_batches)
            await self.group.offload()
        return [float(value) for value in batch.to_matrix(columns)[:, 0]]


def add_model_score(score: Score, value: float, weight: float, required: Iterable[str], alone: bool) -> Score:
    """Add the reward model's `value` to the score of the reward function.

    The reward is reward + weight * value, or 0 if one of `required` is not above 0. Components, without weights:
    `reward_model`; with a reward function also `task`, its total, and `accuracy`, which remains its own. A non-finite
    value, or a component of that name, makes the score a failure.
    """
    if not math.isfinite(value):
        return make_failed_score(f"the reward model's score is {value}")
    parts = score.components
    if COMPONENT in parts:
        return make_failed_score(f"the reward function also returns a component named {COMPONENT}; rename it")
    unmet = [name for name in required if parts.get(name, math.inf) <= 0]
    reward = 0.0 if unmet else score.reward + weight * value
    if alone:
        parts = {name: part for name, part in parts.items() if name not in (TASK, "accuracy")}
    else:
        parts = {"accuracy": score.accuracy, TASK: score.reward} | parts
    return Score(reward, parts | {COMPONENT: value}, score.outcome, score.reason)


def has_reward_function(config: Config, graded: bool, prompts: Iterable[Prompt]) -> bool:
    """Whether anything besides the reward model gives a reward.

    That is the user's function, the environment itself (not `graded`), or a grader of a data source that has what it
    needs. Without a reward model, and with an estimator, it is assumed. Raises ValueError if nothing gives a reward.
    """
    own, needs_reward = config.reward_model, config.algorithm.adv_estimator != NO_ESTIMATOR
    if needs_reward and not own.enable:
        return True
    if config.custom_reward_function.path or not graded or any(map(is_gradable, prompts)):
        return True
    if needs_reward and (own.weight == 0 or TASK in config.reward.required):
        key = "reward_model.weight=0" if own.weight == 0 else f"reward.required has {TASK}"
        raise ValueError(
            f"{key}, but the reward model is the only reward: no row has a data_source with a built-in grader and what "
            "that needs. Add a data_source and ground truth to the rows, or custom_reward_function.path, or change it."
        )
    return False


def make_reward_model_settings(config: RewardModel, policy: Model) -> Model:
    """How to load the reward model: with the policy's arithmetic and attention."""
    own = config.model
    changes = {"path": own.path, "trust_remote_code": own.trust_remote_code, "enable_gradient_checkpointing": False}
    return policy.model_copy(update=changes)


def make_reward_model_tokenizer(config: Config, policy: Renderer, prompts: Sequence[Prompt]) -> RewardModelTokenizer:
    """Decide what the reward model reads.

    Raises ValueError if the folder has no reward model, or if its chats cannot be rendered.
    """
    model = make_reward_model_settings(config.reward_model, config.actor_rollout_ref.model)
    found = load_config(model)
    find_reward_model_class(found, model.path)
    renderer = Renderer(load_tokenizer(model.path, model.trust_remote_code))
    text = found.get_text_config()
    highest = max(renderer.tokenizer.get_vocab().values())
    if highest >= text.vocab_size:
        raise ValueError(
            f"reward_model.model.path={model.path}: its tokenizer has token {highest}, but the model has only "
            f"{text.vocab_size}. Use the tokenizer that it was trained with."
        )
    shares = can_share_tokens(policy, renderer)
    if not shares:
        _check_chats(config, renderer, prompts)
    limit, positions = config.reward_model.max_length, getattr(text, "max_position_embeddings", None)
    if limit is not None and positions is not None and limit > positions:
        raise ValueError(
            f"reward_model.max_length={limit} is too long: {model.path} has {positions} positions. Set {positions} or "
            "less, or null."
        )
    return RewardModelTokenizer(renderer, shares, positions if limit is None else limit, text.vocab_size)


def can_share_tokens(policy: Renderer, own: Renderer) -> bool:
    """Whether every token id of the policy means the same to the reward model, and it has no other chat template."""
    known = own.tokenizer.get_vocab()
    same_ids = all(known.get(token) == number for token, number in policy.tokenizer.get_vocab().items())
    return same_ids and own.tokenizer.chat_template in (None, policy.tokenizer.chat_template)


def _check_chats(config: Config, renderer: Renderer, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if chats have to be rendered again for the reward model, but cannot be."""
    path = config.reward_model.model.path
    reason = f"reward_model.model.path={path} differs from the policy in tokenizer or chat template, and "
    if config.env.max_steps > 1:
        raise ValueError(
            f"{reason}only chats of one turn can be rendered again; env.max_steps={config.env.max_steps}. Set "
            "env.max_steps=1, or use a reward model with the policy's tokenizer and chat template."
        )
    contents = [prompt.content for prompt in prompts if not isinstance(prompt.content, str)]
    chats = {tuple(message["role"] for message in content): content for content in contents}
    if chats and not renderer.tokenizer.chat_template:
        raise ValueError(f"{reason}its tokenizer has no chat template. Save the one it was trained with beside it.")
    for content in chats.values():  # one chat per sequence of roles: templates refuse some
        renderer.render_chat(_add_answer(content, "!"), add_generation_prompt=False)


def _add_answer(asked: Iterable[Message], answer: str) -> list[Message]:
    return [*asked, Message(role="assistant", content=answer)]
