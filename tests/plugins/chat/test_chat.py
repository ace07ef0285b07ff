"""`alphaapollo chat`: turns are printed as they happen, and nothing is graded."""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.cli.main import main
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config, Env
from alphaapollo.environments.base import Observation, Services, StepResult, get_environment_spec
from alphaapollo.observability.terminal import Terminal
from alphaapollo.plugins.chat import command as chat
from alphaapollo.types import Message, Prompt, Score
from examples.quickstart.make_task import make_model, make_tokenizer


class Counting:
    """Synchronous environment with two turns."""

    def __init__(self, services: Services):
        self.services = services

    def reset(self, prompt: Prompt) -> str:
        return f"about {prompt.content}"

    def step(self, action: str) -> StepResult:
        return StepResult(Observation([Message(role="tool", content="42")]), valid=action != "?")

    def close(self) -> None:
        self.closed = True


def test_turns_are_printed_as_they_happen() -> None:
    shown = io.StringIO()
    inner = Counting(None)  # type: ignore[arg-type]
    printed: Any = chat.EnvironmentPrinter(inner, Terminal(file=shown, width=80))

    async def episode() -> None:
        assert printed.reset(Prompt(1, "chat", "sums")) == "about sums"
        result = await printed.step("6 * 7")
        assert result.observation is not None
        await printed.step("?")
        printed.close()

    asyncio.run(episode())
    assert shown.getvalue().splitlines()[:2] == ["6 * 7", "  [tool] 42"]
    assert "could not parse an action" in shown.getvalue()
    assert inner.closed and not hasattr(printed, "recall")


def test_chat_environment_is_not_graded() -> None:
    env = chat.register_printing_environment(Env(env_name="informal_math"), Terminal(file=io.StringIO()))
    registered = get_environment_spec(env.env_name)
    assert not registered.graded

    async def graded(prompt: Prompt, text: str) -> Score:
        raise AssertionError("chat is not graded")

    async def episode() -> StepResult:
        environment = registered.factory(Services(graded, env))
        await environment.reset(Prompt(1, "chat", [Message(role="user", content="hello")]))  # type: ignore[misc]
        return await environment.step("<answer>42</answer>")  # type: ignore[misc]

    assert asyncio.run(episode()).done


def test_chat_with_the_model_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the fake engine: each message is sent with the chat so far, also if it is longer than the training prompts."""
    make_tokenizer(tmp_path / "model")
    make_model(tmp_path / "model", seed=0)
    role = {"model": {"path": "gone"}, "rollout": {"name": "fake"}}
    data = {"max_prompt_length": 12, "max_response_length": 8}  # of training; the model has 512 positions
    save_config(Config(actor_rollout_ref=role, data=data), tmp_path / "config.yaml")
    lines, played = iter(["1+1=", "", "and now", "/quit"]), []
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))

    def note(number: int, data_source: str, content: Any) -> Prompt:
        played.append(content)
        return Prompt(number, data_source, content)

    monkeypatch.setattr(chat, "Prompt", note)
    assert main(["chat", str(tmp_path), "trainer.device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path}/model, in single_turn" in shown
    assert chat.USAGE in shown and "failed" not in shown
    roles = [[message["role"] for message in content] for content in played]
    assert roles == [["user"], ["user", "assistant", "user"]]


@pytest.mark.parametrize(
    ("words", "fact"), [(["."], "has no model and no complete checkpoint yet"), ([], "required: RUN")]
)
def test_a_chat_without_a_model_is_an_error(
    words: list[str], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_config(Config(), tmp_path / "config.yaml")
    with contextlib.suppress(SystemExit):
        assert main(["chat", *words]) == 2
    assert fact in capsys.readouterr().err
