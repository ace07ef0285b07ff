"""Errors of models, environments, tools and graders on the rollout worker: each has a named outcome in the metrics and
in the rollout log, other episodes continue, and no failure has a reward of 0.

docs/environments.md, docs/rewards.md and docs/tools.md describe them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Env, Reward
from alphaapollo.environments import base
from alphaapollo.environments.base import Observation, StepResult, register_environment
from alphaapollo.observability.rollout_metrics import compute_rollout_metrics
from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.tools.base import ToolFailedError, tools
from alphaapollo.tools.function_tool import tool
from alphaapollo.types import GroupRequest, Message, Prompt, Sampling
from tests.unit.rollout.worker_kit import TextEngine, generate, make_worker

BAD, FINE = "bad?", "fine?"
ANSWER = r"<answer>\boxed{4}</answer>"


@dataclass(frozen=True)
class IterationResult:
    """Results of an iteration on the driver."""

    metrics: dict[str, float]
    bad: dict[str, Any]  # line of the rollout log per prompt
    fine: dict[str, Any]
    shown: list[str]  # prompt of each turn of the failing one


def play(
    folder: Path,
    words: Sequence[str] | Callable[[], str],
    env: Env | None = None,
    reward: Reward | None = None,
    truths: tuple[str, str] = ("4", "4"),
    data_source: str = "openai/gsm8k",
    max_tokens: int = 400,
) -> IterationResult:
    """The model answers the failing prompt with `words`, one per turn, and the other one with the right answer."""
    shown: list[str] = []

    def say(text: str) -> str:
        if BAD not in text:
            return ANSWER
        shown.append(text)
        return words() if callable(words) else words[len(shown) - 1]

    worker = make_worker(
        folder, TextEngine(folder, say), env, reward, max_prompt_length=2000, max_response_length=max_tokens
    )
    prompts = [
        Prompt(id, data_source, [Message(role="user", content=question)], ground_truth=truth)
        for id, (question, truth) in enumerate(zip((BAD, FINE), truths, strict=True))
    ]
    groups = generate(worker, *(GroupRequest(prompt, 1, Sampling(max_tokens), stream_position=0) for prompt in prompts))
    bad, fine = map(json.loads, format_trajectory_lines(1, groups))
    return IterationResult(compute_rollout_metrics(groups, groups, 1, 1.0), bad, fine, shown)


def check_masked(played: IterationResult, outcome: str, reason: str) -> None:
    """Check that the failing prompt has a named failure and no reward, and that only the other one is counted."""
    assert (played.bad["outcome"], played.bad["reward"]) == (outcome, None)
    assert reason in played.bad["reason"]
    assert (played.fine["outcome"], played.fine["reward"]) == ("scored", 1.0)
    assert (played.metrics[f"outcome/{outcome}"], played.metrics["outcome/scored"]) == (0.5, 0.5)
    assert played.metrics["critic/score/mean"] == played.metrics["critic/score/min"] == 1.0


# tools: the model gets an error message and continues


@pytest.fixture
def double():
    @tool
    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    yield
    tools._entries.pop("double")


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ('<double>{"x": 2</double>', "refused", "JSON"),
        ("<search>x</search>", "unreadable", "no action"),
        ("<python_code>while True: pass</python_code>", "timeout", "1 s"),
        ("<python_code>import os; os.environ['ALPHAAPOLLO_SECRET']</python_code>", "error", "KeyError"),
        ("<python_code>import os; os.kill(os.getppid(), 9)</python_code>", "error", "PermissionError"),
        ("<python_code>import socket; socket.create_connection(('127.0.0.1', 80))</python_code>", "error", "Error"),
    ],
    ids=lambda value: value[:60],
)
@pytest.mark.usefixtures("double")
def test_the_model_reads_why_a_call_failed_and_continues(folder, monkeypatch, call, status, message):
    """Arguments that a tool refuses: tests/unit/tools/test_toolbox.py. Hostile code: attacks.py, in that folder."""
    monkeypatch.setenv("ALPHAAPOLLO_SECRET", "secret")
    env = Env(env_name="informal_math", max_steps=2, tools=["double"], informal_math={"python_code_timeout": 1.0})
    played = play(folder, [call, ANSWER], env, max_tokens=1 << 18)
    assert f'"{status}"' in json.dumps(played.bad["turns"][0]["info"])
    assert message in played.shown[1]
    assert (played.bad["outcome"], played.bad["reward"], played.bad["end"]) == ("scored", 1.0, "done")
    assert played.fine["reward"] == played.metrics["critic/score/mean"] == 1.0
    assert played.metrics.get(f"tool/{status}") == (None if status == "unreadable" else 1.0)
    assert played.metrics.get("turn/invalid") == (0.0 if "python" in call else pytest.approx(1 / 3))


# tools that break: the environment failed


@tool
def broken_lookup(x: int) -> int:
    """Always fails."""
    raise ToolFailedError("the server is gone")


def test_a_tool_that_breaks_is_an_environment_failure(folder):
    maths = {"enable_python_code": False}
    env = Env(env_name="informal_math", max_steps=2, tools=["broken_lookup"], informal_math=maths)
    played = play(folder, lambda: '<broken_lookup>{"x": 1}</broken_lookup>', env)
    check_masked(played, "environment_failed", "the server is gone")
    assert played.metrics["tool/failed"] == 1.0


# environments


class Moody:
    """Environment that works, except for the failing prompt, for which it calls `trouble()` in the method `where`."""

    where, trouble = "", staticmethod(lambda: None)

    def __init__(self, services: Any):
        self._score = services.score

    async def reset(self, prompt: Prompt) -> object:
        self._prompt = prompt
        return self._act("reset", Observation(prompt.content))

    async def step(self, action: str) -> object:
        return self._act("step", StepResult(done=True, score=await self._score(self._prompt, action)))

    async def close(self) -> None: ...

    def _act(self, where: str, otherwise: object) -> object:
        return self.trouble() if where == self.where and self._prompt.id == 0 else otherwise


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch):
    """Function that plays an episode of the environment with this trouble."""
    monkeypatch.setattr(base._ENVIRONMENTS, "_entries", dict(base._ENVIRONMENTS._entries))
    register_environment("moody", graded=True)(Moody)

    def play_moody(folder: Path, where: str, trouble: Callable[[], object], words: str = ANSWER, **env: Any):
        monkeypatch.setattr(Moody, "where", where)
        monkeypatch.setattr(Moody, "trouble", staticmethod(trouble))
        return play(folder, lambda: words, Env(env_name="moody", **env))

    return play_moody


def fail() -> object:
    raise OSError("the simulator is gone")


def leave() -> object:
    sys.exit("goodbye")


@pytest.mark.parametrize(
    ("where", "trouble", "reason"),
    [
        ("reset", fail, "Moody.reset: OSError: the simulator is gone"),
        ("step", leave, "Moody.step: RuntimeError: "),
        ("reset", lambda: 7, "the result of reset must be an Observation"),
        ("reset", lambda: Observation([{"role": "user", "content": "\ud800"}]), "rendering the observation"),
    ],
)
def test_an_environment_that_raises_or_returns_nonsense_has_failed(folder, moody, where, trouble, reason):
    """Other nonsense: test_episode.py."""
    played = moody(folder, where, trouble, max_steps=2, context="memory")
    check_masked(played, "environment_failed", reason)
    assert played.bad["end"] == "environment_failed" and played.metrics["end/environment_failed"] == 0.5


def test_an_environment_that_never_answers_is_stopped_by_the_time_limit(folder, moody, monkeypatch):
    """The thread of a sync method cannot be stopped. It blocks neither other episodes nor the end of the run."""
    step = Moody.step

    def block(self: Moody, action: str) -> object:
        return time.sleep(3600) if self._prompt.id == 0 else step(self, action)

    monkeypatch.setattr(Moody, "step", block)
    played = moody(folder, "", fail, episode_timeout=2.0)
    check_masked(played, "environment_failed", "env.episode_timeout=2 s")
    assert "turn 1" in played.bad["reason"] and len(played.shown) == 1  # no second attempt
    assert (played.bad["end"], played.metrics["end/time_limit"]) == ("time_limit", 0.5)


def test_an_environment_that_never_ends_is_stopped_by_the_turn_limit(folder, moody):
    again = StepResult(Observation([Message(role="user", content=BAD)]))
    played = moody(folder, "step", lambda: again, words="hm", max_steps=5)
    assert (played.bad["end"], len(played.bad["turns"])) == ("turn_limit", 5)
    assert (played.bad["outcome"], played.bad["reward"]) == ("wrong_format", 0.0)  # the model's: it never answered
    assert played.bad["reason"].startswith("no answer before the turn limit: ")
    assert played.bad["components"].keys() == played.fine["components"].keys()  # gdpo compares them
    assert (played.metrics["end/turn_limit"], played.metrics["outcome/wrong_format"]) == (0.5, 0.5)
    assert played.fine["reward"] == 1.0
