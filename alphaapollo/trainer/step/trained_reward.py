"""The part of a trained reward model in the reward: what it reads of a trajectory, and how its score counts.

groups -> Reader: token ids of each trajectory -> one layout -> workers -> a score each -> Score with `reward_model`
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from alphaapollo.algorithms.advantages.none import NO_ESTIMATOR
from alphaapollo.config.schema import Config, Model, RewardModel
from alphaapollo.controller.handles import EngineGroup, RewardModelGroup
from alphaapollo.data.batch import TrainBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.models.load import load_config, reward_model_class
from alphaapollo.rewards.base import failure
from alphaapollo.rewards.components import TASK
from alphaapollo.rewards.registry import is_gradable
from alphaapollo.types import Message, Prompt, Row, Score, Trajectory, TrajectoryGroup

NAME = "reward_model"
"""The component of a score."""


@dataclass(frozen=True)
class Reader:
    """From a trajectory to the tokens that the reward model reads.

    With the policy's tokens and chat template that is its last row, as the engine saw it; else its one turn as a chat
    (or text), rendered anew.
    """

    renderer: Renderer  # the reward model's
    shares_tokens: bool
    max_length: int | None
    vocabulary: int

    def describe(self, config: RewardModel, has_function: bool) -> str:
        """The line of the plan."""
        function = "the reward function + " if has_function else ""
        text = "the policy's tokens" if self.shares_tokens else "chats in its own template"
        limit = "" if self.max_length is None else f", the last {self.max_length}"
        return f"{function}{config.weight:g} x the reward model's score (of {text}{limit}): {config.model.path}"

    def read_all(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """All tokens of each, before `cut`; none of one without any."""
        return [self.read(trajectory) if trajectory.rows else [] for trajectory in trajectories]

    def read(self, trajectory: Trajectory) -> list[int]:
        if self.shares_tokens:
            return self.renderer.ended(list(trajectory.rows[-1].token_ids))
        asked, answer = trajectory.asked, trajectory.turns[-1].text
        assert asked is not None and len(trajectory.turns) == 1, "make_reader refuses several turns"
        if isinstance(asked, str):
            return self.renderer.encode([asked + answer], add_special_tokens=True)[0]
        return self.renderer.encode([self.renderer.text(_answered(asked, answer), add_generation_prompt=False)])[0]

    def cut(self, token_ids: list[int]) -> list[int]:
        """The last max_length tokens: the score is read at the very last."""
        return token_ids if self.max_length is None else token_ids[-self.max_length :]

    def problem(self, token_ids: list[int]) -> str | None:
        """Why the reward model cannot read these tokens."""
        if len(token_ids) < 2:
            return "there is no text to score"
        if max(token_ids) >= self.vocabulary:
            return f"the reward model has {self.vocabulary} tokens, and token {max(token_ids)} is none of them"
        return None


@dataclass
class TrainedReward:
    """Completes the scores of trajectories as they arrive from the engines."""

    group: RewardModelGroup
    engines: EngineGroup  # which have the GPUs when its phase comes
    reader: Reader
    num_ranks: int  # with texts of their own
    max_tokens: int  # of a micro-batch
    padded: bool
    weight: float
    required: Sequence[str]  # components that must be above 0, or the whole reward is 0
    alone: bool  # there is no reward function
    _read: int = field(default=0, init=False)
    _cut: int = field(default=0, init=False)

    async def add_to(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Score every trajectory that has not failed, greedy baselines too, in place."""
        members = [one for group in groups for one in (*group.trajectories, group.baseline) if one is not None]
        members = [one for one in members if not one.score.outcome.failed]
        readable: dict[int, list[int]] = {}
        for index, whole in enumerate(await asyncio.to_thread(self.reader.read_all, members)):
            if problem := self.reader.problem(whole):
                members[index].score = failure(problem)
            else:
                readable[index] = self.reader.cut(whole)
                self._cut += len(readable[index]) < len(whole)
        self._read += len(readable)
        values = await self._compute(list(readable.values()))
        for index, value in zip(readable, values, strict=True):
            one = members[index]
            own = replace(one.score, components={"accuracy": one.accuracy} | one.score.components)
            one.score = with_model_score(own, value, self.weight, self.required, self.alone)

    def figures(self) -> dict[str, float]:
        """The share of texts that were cut to reward_model.max_length, since last asked."""
        share = self._cut / self._read if self._read else 0.0
        self._read = self._cut = 0
        return {"reward_model/truncated": share}

    async def _compute(self, texts: list[list[int]]) -> list[float]:
        if not texts:
            return []
        layout = deal(texts, self.num_ranks, self.max_tokens, self.padded)
        async with self.engines.cache_released():
            columns = await self.group.compute_scores(layout.rank_batches)
            await self.group.offload()
        return [float(value) for value in layout.to_matrix(columns)[:, 0]]


def deal(texts: Sequence[list[int]], num_ranks: int, max_tokens: int, padded: bool) -> TrainBatch:
    """Texts to ranks and micro-batches, as rows whose response is their last token: there the score stands."""
    rows = [Row(ids, [0] * (len(ids) - 1) + [1], [0.0] * len(ids), [len(ids) - 1]) for ids in texts]
    return build_train_batch(rows, range(len(rows)), num_ranks, len(rows), max_tokens, padded, seed=0, shuffle=False)


def with_model_score(score: Score, value: float, weight: float, required: Iterable[str], alone: bool) -> Score:
    """The reward function's score with the reward model's in it: reward + weight * value, or 0 if one of `required` is
    not above 0.

    Among the components, without weights: `reward_model`; where there is a reward function also `task`, what it gave in
    all, and `accuracy`, which stays its own. A failure: a value that is not finite, or a component of that name.
    """
    if not math.isfinite(value):
        return failure(f"the reward model's score is {value}")
    parts = score.components
    if NAME in parts:
        return failure(f"the reward function gives a component named {NAME}, too: rename it")
    unmet = [name for name in required if parts.get(name, math.inf) <= 0]
    reward = 0.0 if unmet else score.reward + weight * value
    if alone:
        parts = {name: part for name, part in parts.items() if name not in (TASK, "accuracy")}
    else:
        parts = {"accuracy": score.accuracy, TASK: score.reward} | parts
    return Score(reward, parts | {NAME: value}, score.outcome, score.reason)


def find_function(config: Config, graded: bool, prompts: Iterable[Prompt]) -> bool:
    """Does anything besides the reward model give a reward: the user's function, the environment itself (not `graded`),
    or the graders of the data sources? They do unless not one prompt has what its grader needs, and a reward model is
    there, or a teacher alone is learnt from. ValueError: nothing would be rewarded."""
    own, is_wanted = config.reward_model, config.algorithm.adv_estimator != NO_ESTIMATOR
    if (
        (is_wanted and not own.enable)
        or config.custom_reward_function.path
        or not graded
        or any(map(is_gradable, prompts))
    ):
        return True
    if is_wanted and (own.weight == 0 or TASK in config.reward.required):
        key = "reward_model.weight=0" if own.weight == 0 else f"reward.required has {TASK}"
        raise ValueError(
            f"{key}, but no row has a data_source with a built-in grader (and what that needs), so the reward model is "
            "all there is. Give rows with a data_source and ground truth, or custom_reward_function.path, or change it."
        )
    return False


def scorer_model(config: RewardModel, policy: Model) -> Model:
    """How to load the reward model: with the policy's arithmetic and attention."""
    own = config.model
    changes = {"path": own.path, "trust_remote_code": own.trust_remote_code, "enable_gradient_checkpointing": False}
    return policy.model_copy(update=changes)


def make_reader(config: Config, policy: Renderer, prompts: Sequence[Prompt]) -> Reader:
    """What the reward model reads, decided once. Raises ValueError for a folder that holds no reward model, and for
    chats that it cannot be shown."""
    model = scorer_model(config.reward_model, config.actor_rollout_ref.model)
    found = load_config(model)
    reward_model_class(found, model.path)
    renderer = Renderer(load_tokenizer(model.path, model.trust_remote_code))
    text = found.get_text_config()
    highest = max(renderer.tokenizer.get_vocab().values())
    if highest >= text.vocab_size:
        raise ValueError(
            f"reward_model.model.path={model.path}: its tokenizer knows token {highest}, but the model has only "
            f"{text.vocab_size}. Give the tokenizer that it was trained with."
        )
    shares = shares_tokens(policy, renderer)
    if not shares:
        _check_chats(config, renderer, prompts)
    limit = _limit(config.reward_model.max_length, getattr(text, "max_position_embeddings", None), model.path)
    return Reader(renderer, shares, limit, text.vocab_size)


def shares_tokens(policy: Renderer, own: Renderer) -> bool:
    """Does every token id of the policy mean the same to the reward model, and does it know no other chat template?"""
    known = own.tokenizer.get_vocab()
    same_ids = all(known.get(token) == number for token, number in policy.tokenizer.get_vocab().items())
    return same_ids and own.tokenizer.chat_template in (None, policy.tokenizer.chat_template)


def _check_chats(config: Config, renderer: Renderer, prompts: Sequence[Prompt]) -> None:
    """ValueError: chats have to be rendered anew, and cannot be."""
    other = f"reward_model.model.path={config.reward_model.model.path} has another tokenizer or chat template than the "
    other += "policy, so it is shown each chat rendered anew, but "
    if config.env.max_steps > 1:
        raise ValueError(
            f"{other}env.max_steps={config.env.max_steps}: only chats of one turn can be. Set "
            "env.max_steps=1, or give a reward model with the policy's tokenizer and chat template."
        )
    contents = [prompt.content for prompt in prompts if not isinstance(prompt.content, str)]
    chats = {tuple(message["role"] for message in content): content for content in contents}
    if chats and not renderer.tokenizer.chat_template:
        raise ValueError(f"{other}its tokenizer has no chat template. Save the one it was trained with beside it.")
    for content in chats.values():  # one chat of each sequence of roles: templates refuse some
        renderer.text(_answered(content, "!"), add_generation_prompt=False)


def _answered(asked: Iterable[Message], answer: str) -> list[Message]:
    return [*asked, Message(role="assistant", content=answer)]


def _limit(wanted: int | None, positions: int | None, path: str) -> int | None:
    if wanted is not None and positions is not None and wanted > positions:
        raise ValueError(
            f"reward_model.max_length={wanted}: {path} has {positions} positions. Set {positions} or less, or null."
        )
    return positions if wanted is None else wanted
