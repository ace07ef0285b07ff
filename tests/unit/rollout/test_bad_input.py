"""Errors of models, environments, tools and graders on the rollout worker: each has a named outcome in the metrics and
in the rollout log, other episodes continue, and no failure has a reward of 0.

The table is in docs/environments.md.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Env, Judge, Reward
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.engines.fake import FakeEngine
from alphaapollo.environments.base import Observation, StepResult, register_environment
from alphaapollo.runs.rollout_log import format_trajectory_lines
from alphaapollo.tools.base import tools
from alphaapollo.tools.function_tool import tool
from alphaapollo.tools.retrieval import build_index
from alphaapollo.trainer.metrics import compute_rollout_metrics
from alphaapollo.types import GroupRequest, Message, Prompt, Sampling
from tests.mock_judge import MockJudge
from tests.unit.rollout.worker_kit import generate, make_worker, write_model

SECRET = "a-secret-of-the-run"
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
    say: Callable[[int], str],
    env: Env | None = None,
    reward: Reward | None = None,
    truths: tuple[str, str] = ("4", "4"),
    data_source: str = "openai/gsm8k",
    max_tokens: int = 400,
    answer: str = ANSWER,
) -> IterationResult:
    """The model answers `say(turn)` to the failing prompt and `answer` to the other one."""
    renderer = Renderer(load_tokenizer(str(folder)))
    shown: list[str] = []

    def script(token_ids: list[int], sampling: Sampling) -> list[int]:
        text, words = renderer.decode(token_ids), answer
        if BAD in text:
            shown.append(text)
            words = say(len(shown) - 1)
        return [*renderer.encode([words])[0], *sampling.stop_token_ids]

    engine = FakeEngine(272, script=script)
    worker = make_worker(folder, engine, env, reward, max_prompt_length=2000, max_response_length=max_tokens)
    prompts = [
        Prompt(id, data_source, [Message(role="user", content=words)], ground_truth=truth)
        for id, (words, truth) in enumerate(zip((BAD, FINE), truths, strict=True))
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


# tools: the model gets an error message and continues


@pytest.fixture
def double():
    @tool
    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    yield
    tools._entries.pop("double")


def check_tool_message(played: IterationResult, status: str, message: str) -> None:
    """The status of the call is in metrics and log. The model got the message and answered correctly."""
    assert f'"{status}"' in json.dumps(played.bad["turns"][0]["info"])
    assert message in played.shown[1]
    assert (played.bad["outcome"], played.bad["reward"], played.bad["end"]) == ("scored", 1.0, "done")
    assert played.fine["reward"] == played.metrics["critic/score/mean"] == 1.0


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ('<double>{"x": 2</double>', "refused", "JSON"),
        ('<double>{"y": 2}</double>', "refused", "'y'"),
        (f'<double>{{"x": "{"9" * (1 << 20)}"}}</double>', "refused", "65536"),
        ("<search>x</search>", "unreadable", "no action"),
    ],
    ids=["broken JSON", "unknown argument", "1 MB argument", "unknown tool"],
)
@pytest.mark.usefixtures("double")
def test_a_bad_call_is_an_invalid_turn(folder, call, status, message):
    env = Env(env_name="informal_math", max_steps=2, tools=["double"], informal_math={"enable_python_code": False})
    played = play(folder, [call, ANSWER].__getitem__, env, max_tokens=1 << 21)
    check_tool_message(played, status, message)
    assert played.metrics.get("tool/refused") == (1.0 if status == "refused" else None)
    assert played.metrics["turn/invalid"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("while True: print('x' * 1000000)", "error", "stopped after printing 16 MiB"),
        ("while True: pass", "timeout", "1 s"),
        ("import os\nwhile True: os.fork()", "error", "PermissionError"),
        ("x = bytearray(1 << 34)", "error", "Memory"),
        (f"print(open({__file__!r}).read())", "error", "Error"),
        ("print(__import__('os').environ['ALPHAAPOLLO_SECRET'])", "error", "KeyError"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "error", "Error"),
        ("import os\nos.kill(os.getppid(), 9)", "error", "PermissionError"),
    ],
    ids=["prints 1 GB", "loops", "forks", "eats memory", "reads files", "reads secrets", "sockets", "kills its parent"],
)
def test_hostile_code_is_stopped_and_the_episode_continues(folder, monkeypatch, code, status, message):
    monkeypatch.setenv("ALPHAAPOLLO_SECRET", SECRET)
    env = Env(env_name="informal_math", max_steps=2, informal_math={"python_code_timeout": 1.0})
    played = play(folder, [f"<python_code>{code}</python_code>", ANSWER].__getitem__, env, max_tokens=20_000)
    check_tool_message(played, status, message)
    assert played.metrics[f"tool/{status}"] == 1.0
    assert SECRET not in played.shown[1]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", "the code ends with timeout"),
        ("while True: print('x' * 1000000)", "the code ends with output"),
        ("x = bytearray(1 << 34)", "the code ends with memory"),
        ("import os\nos.kill(os.getppid(), 9)", "the code ends with error"),
    ],
)
def test_hostile_program_fails_its_tests(folder, code, reason):
    """An error of the model's code is not a failure of the tool."""
    truth = json.dumps({"inputs": [""], "outputs": ["4\n"], "time_limit": 1})
    say = "```python\n{}\n```".format
    played = play(
        folder,
        lambda turn: say(code),
        truths=(truth, truth),
        data_source="code",
        answer=say("print(4)"),
        max_tokens=400,
    )
    assert (played.bad["outcome"], played.bad["reward"]) == ("scored", 0.0)
    assert reason in played.bad["reason"] and played.fine["reward"] == 1.0


# tools that break: the environment failed


def test_deleted_index_is_an_environment_failure(folder, tmp_path):
    (tmp_path / "docs" / "notes").mkdir(parents=True)
    (tmp_path / "docs" / "notes" / "a.md").write_text("Bananas are yellow.")
    build_index(str(tmp_path / "docs"), str(tmp_path / "index"))

    env = Env(
        env_name="informal_math",
        informal_math={"enable_python_code": False, "enable_local_rag": True},
        tool_settings={"local_rag": {"index": str(tmp_path / "index")}},
    )

    def say(turn: int) -> str:
        shutil.rmtree(tmp_path / "index", ignore_errors=True)
        return '<local_rag>{"repo_name": "notes", "query": "yellow"}</local_rag>'

    check_masked(play(folder, say, env), "environment_failed", "passages.jsonl")


def test_a_mcp_server_that_dies_is_an_environment_failure(folder):
    pytest.importorskip("mcp")
    program = Path(__file__).parents[1] / "tools" / "mcp_server.py"
    env = Env(
        env_name="informal_math",
        max_steps=2,
        informal_math={"enable_python_code": False},
        mcp_servers={"small": {"command": [sys.executable, str(program)]}},
    )
    played = play(folder, lambda turn: "<die>{}</die>", env)
    check_masked(played, "environment_failed", "MCP server small: Connection closed")
    assert played.metrics["tool/failed"] == 1.0


# graders: no reward


def test_an_answer_that_hangs_sympy_is_a_grader_failure(folder):
    truths = ("9^{9^{9^{9}}}", "4")
    played = play(folder, lambda turn: r"\boxed{3}", reward=Reward(timeout=3.0), truths=truths, data_source="math")
    check_masked(played, "grader_failed", "no answer within 3 s")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [("I rather like it.", "'SCORE: ...'"), ("SCORE: 7", "between 0 and 1"), (429, "RateLimitError")],
)
def test_a_judge_that_gives_no_verdict_is_a_grader_failure(folder, monkeypatch, reply, reason):
    pytest.importorskip("openai", reason="the judge's client is an optional package")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with MockJudge(lambda text: reply if BAD in text else "SCORE: 1").serve() as judge:
        reward = Reward(timeout=60.0, judge=Judge(model="m", base_url=judge.url))
        played = play(folder, lambda turn: "4", reward=reward, data_source="judge")
    check_masked(played, "grader_failed", reason)


# environments


class Moody:
    """Environment that works, except for the failing prompt, for which it calls `trouble(environment)` at `where`."""

    where = "step"

    @staticmethod
    def trouble() -> object:
        raise NotImplementedError

    def __init__(self, services: Any):
        self._score = services.score

    async def reset(self, prompt: Prompt) -> object:
        self._prompt = prompt
        return self._act("reset", Observation(prompt.content))

    async def step(self, action: str) -> object:
        return self._act("step", StepResult(done=True, score=await self._score(self._prompt, action)))

    async def close(self) -> None:
        self._act("close", None)

    def _act(self, where: str, otherwise: object) -> object:
        return self.trouble() if where == self.where and self._prompt.id == 0 else otherwise


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch):
    from alphaapollo.environments import base

    register_environment("moody", graded=True)(Moody)
    yield lambda where, trouble: (
        monkeypatch.setattr(Moody, "where", where),
        monkeypatch.setattr(Moody, "trouble", staticmethod(trouble)),
    )
    base._ENVIRONMENTS._entries.pop("moody")


def fail() -> object:
    raise OSError("the simulator is gone")


def leave() -> object:
    sys.exit("goodbye")


@pytest.mark.parametrize(
    ("where", "trouble", "reason"),
    [
        ("reset", fail, "Moody.reset: OSError: the simulator is gone"),
        ("step", fail, "Moody.step: OSError: the simulator is gone"),
        ("step", leave, "Moody.step: RuntimeError: "),
        ("reset", lambda: 7, "the result of reset must be an Observation"),
        ("reset", lambda: Observation([{"role": "user", "content": "\ud800"}]), "rendering the observation"),
        ("step", lambda: {"reward": 0.0}, "the result of step must be a StepResult"),
        ("step", lambda: StepResult(done=True, score=0.0), "score must be a Score, not float"),
        ("step", lambda: StepResult(Observation(BAD)), "messages must be a non-empty list, not '"),
    ],
)
@pytest.mark.parametrize("context", ["append", "memory"])
def test_an_environment_that_raises_or_returns_nonsense_has_failed(folder, moody, where, trouble, reason, context):
    moody(where, trouble)
    env = Env(env_name="moody", max_steps=2, context=context)
    played = play(folder, lambda turn: ANSWER, env)
    check_masked(played, "environment_failed", reason)
    assert played.bad["end"] == "environment_failed" and played.metrics["end/environment_failed"] == 0.5


def test_an_environment_that_raises_when_it_is_closed_keeps_its_score(folder, moody):
    moody("close", fail)
    played = play(folder, lambda turn: ANSWER, Env(env_name="moody"))
    assert played.bad["reward"] == played.fine["reward"] == 1.0


@pytest.mark.parametrize("sync", [True, False])
def test_an_environment_that_never_answers_is_stopped_by_the_time_limit(folder, moody, monkeypatch, sync):
    """The thread of a sync method cannot be stopped. It blocks neither other episodes nor the end of the run."""
    step = Moody.step

    async def wait(self: Moody, action: str) -> object:
        return await asyncio.sleep(3600) if self._prompt.id == 0 else await step(self, action)

    def block(self: Moody, action: str) -> object:
        return time.sleep(3600) if self._prompt.id == 0 else step(self, action)

    monkeypatch.setattr(Moody, "step", block if sync else wait)
    played = play(folder, lambda turn: ANSWER, Env(env_name="moody", episode_timeout=4.0))
    check_masked(played, "environment_failed", "env.episode_timeout=4 s")
    assert "turn 1" in played.bad["reason"] and len(played.shown) == 1  # no second attempt
    assert (played.bad["end"], played.metrics["end/time_limit"]) == ("time_limit", 0.5)


def test_an_environment_that_never_ends_is_stopped_by_the_turn_limit(folder, moody):
    moody("step", lambda: StepResult(Observation([Message(role="user", content=BAD)])))
    played = play(folder, lambda turn: "hm", Env(env_name="moody", max_steps=5))
    assert (played.bad["end"], len(played.bad["turns"])) == ("turn_limit", 5)
    assert (played.bad["outcome"], played.bad["reward"]) == ("wrong_format", 0.0)  # the model's: it never answered
    assert played.bad["reason"].startswith("no answer before the turn limit: ")
    assert played.bad["components"].keys() == played.fine["components"].keys()  # gdpo compares them
    assert (played.metrics["end/turn_limit"], played.metrics["outcome/wrong_format"]) == (0.5, 0.5)
    assert played.fine["reward"] == 1.0
