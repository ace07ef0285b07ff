"""Inputs of a reward model, and its score in the reward."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alphaapollo.batching.batch import RankBatch
from alphaapollo.config.schema import Config, RewardModel
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.trainer.step.reward_model_scorer import RewardModelScorer, add_reward_model_score
from alphaapollo.trainer.step.reward_model_tokenizer import (
    RewardModelTokenizer,
    make_reward_model_tokenizer,
    uses_reward_function,
)
from alphaapollo.types import Outcome, Prompt, Score, StopReason, Trajectory, TrajectoryGroup
from examples.quickstart.make_task import make_tokenizer
from tests.builders import make_group, make_trajectory, make_turn
from tests.unit.tiny import save_model, save_scorer

CHAT = [{"role": "user", "content": "2+2="}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a ChatML template."""
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


@pytest.fixture
def renderer(folder: Path) -> Renderer:
    return Renderer(load_tokenizer(str(folder)))


def reader(renderer: Renderer, **settings: Any) -> RewardModelTokenizer:
    return RewardModelTokenizer(renderer, **{"shares_tokens": True, "max_length": None, "vocab_size": 1000} | settings)


def trajectory(*rows: list[int], score: Score | float = 1.0) -> Trajectory:
    """Each row is a turn, with a prompt of one token."""
    turns = [make_turn(ids[1:], ids[:1], "4") for ids in rows]
    return make_trajectory(*turns, score=score, memory=True, first_observation=CHAT)


class SumOfTokens:
    """Scores a row with the sum of its tokens. replace: other scores by sum."""

    def __init__(self, replace: dict[float, float] | None = None):
        self.replace = replace or {}
        self.calls: list[int] = []

    async def offload(self) -> None:
        pass

    async def compute_scores(self, batches: Sequence[RankBatch]) -> list[np.ndarray]:
        self.calls.append(len(batches))
        columns = []
        for batch in batches:
            rows, walked = batch.rows, [p for step in batch.mini_batches for micro in step.micro_batches for p in micro]
            assert sorted(walked) == list(range(len(rows)))
            sums = [float(rows.select([row]).token_ids.sum()) for row in range(len(rows))]
            columns.append(np.array([self.replace.get(value, value) for value in sums], dtype=np.float32))
        return columns


class Engines:
    """Engines with a cache to release."""

    @asynccontextmanager
    async def release_kv_cache_temporarily(self) -> AsyncIterator[None]:
        yield


def add_to(
    groups: list[TrajectoryGroup], own: RewardModelTokenizer, weight: float = 0.5, model: Any = None
) -> tuple[RewardModelScorer, SumOfTokens]:
    model = model or SumOfTokens()
    keys = {"weight": weight, "forward_max_token_len_per_gpu": 6}
    config = Config().model_copy(update={"reward_model": RewardModel(**keys)})  # type: ignore[arg-type]
    placement: Any = SimpleNamespace(data_parallel_size=2, sequence_parallel=1)
    reward = RewardModelScorer(config, placement, True, model, Engines(), own, is_only_reward=False)  # type: ignore[arg-type]
    asyncio.run(reward.score_groups(groups))
    return reward, model


def test_every_trajectory_gets_its_own_score(renderer: Renderer) -> None:
    """The score of its last row, from any rank; failed trajectories are not scored."""
    failed = Score(math.nan, outcome=Outcome.GRADER_FAILED, reason="broken")
    groups = [
        make_group(trajectory([5, 6, 7]), trajectory([5, 1], score=failed), trajectory([5, 9, 9, 9], [8, 3])),
        make_group(trajectory([1, 1, 1, 1, 1]), baseline=trajectory([2, 40])),
    ]
    _, model = add_to(groups, reader(renderer))
    (first, broken, memory), (last,) = groups[0].trajectories, groups[1].trajectories
    assert groups[1].baseline is not None
    assert [one.score.reward for one in (first, memory, last)] == [1 + 9, 1 + 5.5, 1 + 2.5]
    assert groups[1].baseline.score.reward == 1 + 21
    assert first.score.components == {"accuracy": 1.0, "task": 1.0, "reward_model": 18.0}
    assert broken.score is failed
    assert model.calls == [2]


def test_non_finite_scores_and_unreadable_tokens_are_failures(renderer: Renderer) -> None:
    rows = ([5, 6], [5, 7], [5, 8], [5, 1000])
    groups = [make_group(*map(trajectory, rows), trajectory())]
    add_to(groups, reader(renderer), model=SumOfTokens({11.0: math.nan, 12.0: -math.inf}))
    scores = [one.score for one in groups[0].trajectories]
    failed = Outcome.GRADER_FAILED
    assert [score.outcome for score in scores] == [failed, failed, Outcome.SCORED, failed, failed]
    for score, fact in zip(scores, ("is nan", "is -inf", "", "token 1000 .* of 1000", "no text"), strict=True):
        assert re.search(fact, score.reason) and bool(score.reason) == math.isnan(score.reward)
    assert scores[2].reward == 7.5


def test_truncation_keeps_the_last_tokens_and_is_counted(renderer: Renderer) -> None:
    groups = [make_group(trajectory([50, 6, 7]), trajectory([5, 6]), trajectory([3, 2]), trajectory([60, 60, 1, 1]))]
    reward, _ = add_to(groups, reader(renderer, max_length=2))
    assert [one.score.components["reward_model"] for one in groups[0].trajectories] == [13, 11, 5, 2]
    assert [reward.pop_metrics()["reward_model/truncated"] for _ in range(2)] == [0.5, 0.0]
    _, model = add_to([], reader(renderer))
    assert model.calls == [], "no call without texts"


def test_model_score_is_added_to_the_reward() -> None:
    task = Score(0.7, {"accuracy": 1.0, "format": 0.0}, Outcome.WRONG_FORMAT, "no answer")
    both = add_reward_model_score(task, 3.0, 0.5, [], is_only_reward=False)
    assert both.reward == 2.2 and (both.outcome, both.reason) == (Outcome.WRONG_FORMAT, "no answer")
    assert both.components == {"accuracy": 1.0, "task": 0.7, "format": 0.0, "reward_model": 3.0}
    assert add_reward_model_score(task, 3.0, 0.5, ["format"], is_only_reward=False).reward == 0.0
    named = Score(0.8, {"accuracy": 1.0, "task": 1.0, "format": 0.0})  # reward.components has named its parts
    assert add_reward_model_score(named, 3.0, 0.0, [], is_only_reward=False).components["task"] == 1.0
    ungraded = Score(0.1, {"accuracy": 0.0, "task": 0.0, "format": 1.0})
    alone = add_reward_model_score(ungraded, 3.0, 2.0, [], is_only_reward=True)
    assert alone.reward == 6.1 and alone.accuracy is None
    assert alone.components == {"format": 1.0, "reward_model": 3.0}
    clash = add_reward_model_score(Score(1.0, {"reward_model": 1.0}), 3.0, 1.0, [], is_only_reward=False)
    assert clash.outcome is Outcome.GRADER_FAILED and "rename it" in clash.reason


def test_shared_tokens_are_used_unchanged(renderer: Renderer) -> None:
    """A complete response is followed by what the template writes after it, here a line break."""
    whole = renderer.tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": "4"}], tokenize=False)
    ids = renderer.encode([whole])[0]
    line_break = renderer.encode(["\n"])[0]
    assert whole.endswith("\n") and ids[-1:] == line_break
    assert reader(renderer).encode_trajectory(trajectory(ids[:-1])) == ids
    assert reader(renderer).encode_trajectory(trajectory(ids[:-2])) == ids[:-2]  # cut off in the middle


@pytest.mark.parametrize("prompt", [CHAT, "2+2="], ids=["chat", "text"])
def test_only_a_complete_response_ends_for_the_reward_model(renderer: Renderer, prompt: Any) -> None:
    """Rendered again as in reward-model training; a response cut off by the length limit has no end."""
    rerendered = reader(renderer, shares_tokens=False)
    complete, truncated = trajectory([5, 6]), trajectory([5, 6])
    truncated.turns[0].completion = replace(truncated.turns[0].completion, stop_reason=StopReason.LENGTH)
    for one in (complete, truncated):
        one.first_observation = prompt
    end = renderer.turn_end_ids if prompt is CHAT else [renderer.tokenizer.eos_token_id]
    ids = rerendered.encode_trajectory(truncated)
    assert renderer.decode(ids).endswith("2+2=4" if prompt != CHAT else "4")
    assert rerendered.encode_trajectory(complete) == ids + end and ids[-len(end) :] != end


def config(policy: Path, scorer: Path, **settings: Any) -> Config:
    nested: dict[str, Any] = {"reward_model": {"enable": True, "model": {"path": str(scorer)}}}
    nested["actor_rollout_ref"] = {"model": {"path": str(policy)}}
    for key, value in settings.items():
        section, _, name = key.partition("__")
        nested.setdefault(section, {})[name] = value
    return Config(**nested)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy and a reward model of the same 48 words, without chat templates."""
    policy, scorer = (tmp_path_factory.mktemp(name) for name in ("policy", "scorer"))
    return save_model("qwen3", policy), save_scorer("qwen3", scorer)


def refusal(models: tuple[Path, Path], policy: Renderer | None = None, **settings: Any) -> str:
    own = policy or Renderer(load_tokenizer(str(models[0])))
    with pytest.raises(ValueError) as caught:
        make_reward_model_tokenizer(config(*models, **settings), own, [Prompt(0, "test", CHAT)])  # type: ignore[arg-type]
    assert str(caught.value).endswith(".")
    return str(caught.value)


def test_the_tokenizer_is_made_from_the_two_folders(models: tuple[Path, Path]) -> None:
    policy = Renderer(load_tokenizer(str(models[0])))
    made = make_reward_model_tokenizer(config(*models, reward_model__max_length=64), policy, [])
    assert (made.shares_tokens, made.max_length, made.vocab_size) == (True, 64, 48)
    assert make_reward_model_tokenizer(config(*models), policy, []).max_length == 128  # the model's positions


def test_unusable_reward_models_are_refused(models: tuple[Path, Path], renderer: Renderer, tmp_path: Path) -> None:
    save_scorer("qwen3", tmp_path)
    make_tokenizer(tmp_path)  # of about 270 tokens
    vision: Any = Renderer(load_tokenizer(str(models[0])), images=object())  # type: ignore[arg-type]
    for text, facts in (
        (refusal((models[0], models[0])), ("not a reward model",)),
        (refusal(models, vision), ("do not read images",)),
        (refusal(models, reward_model__max_length=129), ("max_length=129", "128 positions")),
        (refusal(models, renderer, env__max_steps=2), ("env.max_steps=2",)),
        (refusal(models, renderer, env__env_name="agent"), ("env.env_name=agent",)),
        (refusal(models, renderer), ("no chat template",)),
        (refusal((models[0], tmp_path)), ("tokenizer", "48 tokens")),
    ):
        assert all(fact in text for fact in facts), text


def test_the_reward_model_is_alone_only_if_no_row_can_be_graded(models: tuple[Path, Path]) -> None:
    gradable, ungradable = Prompt(0, "openai/gsm8k", "1+1=", "2"), Prompt(1, "chats", "hello")
    alone = config(*models)
    assert uses_reward_function(alone, True, [ungradable]) is False
    both = [gradable, ungradable]  # the second is then an error of the data
    assert uses_reward_function(alone, True, both) is True
    assert uses_reward_function(alone, False, [ungradable]) is True  # the environment itself gives a score
    own = alone.custom_reward_function.model_copy(update={"path": "reward.py"})
    assert uses_reward_function(alone.model_copy(update={"custom_reward_function": own}), True, [ungradable]) is True
    for settings, key in (({"reward_model__weight": 0.0}, "weight=0"), ({"reward__required": ["task"]}, "has task")):
        with pytest.raises(ValueError, match=f"{key}.* only reward"):
            uses_reward_function(config(*models, **settings), True, [ungradable])
