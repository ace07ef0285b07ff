from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from alphaapollo.cli import chat, serve
from alphaapollo.cli.main import main
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config, Env, GenerationConfig
from alphaapollo.environments.base import Observation, Services, StepResult, get_environment_spec
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.processes.network import find_free_port
from alphaapollo.runs import newest_model
from alphaapollo.session.inference import DEFAULT_CONTEXT, ServePreparation
from alphaapollo.types import Message, Prompt, Score
from examples.quickstart.make_task import make_model, make_tokenizer
from tests.unit.tiny import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3", tmp_path_factory.mktemp("served"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments with which a server would start."""
    arguments: list[Any] = []
    monkeypatch.setattr(serve, "run_server", lambda *given: arguments.extend(given) or 0)
    return arguments


def test_serve_starts_the_server(model: Path, started: list[Any]) -> None:
    port = find_free_port()
    keys = ["trainer.device=cpu", "rollout.kv_cache_gib=0.25", "--api-key", "x"]
    assert main(["serve", str(model), "--port", str(port), "--shutdown-timeout", "9", *keys]) == 0
    words, variables, address, message, grace_seconds = started
    assert "VLLM_API_KEY" not in message and f"vllm chat --url http://127.0.0.1:{port}/v1" in message
    assert words[words.index("--model") + 1] == str(model)
    assert words[words.index("--port") + 1] == str(port) and address == ("127.0.0.1", port)
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(2**28)
    assert words[words.index("--shutdown-timeout") + 1] == "9" and grace_seconds == 9
    assert words[-2:] == ["--api-key", "x"]  # vLLM's own
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(("key", "is_warned"), [("", True), ("secret", False)])
def test_serving_to_other_machines_without_a_key(
    key: str, is_warned: bool, model: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    words = ["--host", "0.0.0.0", "--port", str(find_free_port()), "trainer.device=cpu"]
    assert main(["serve", str(model), *words]) == 0
    assert ("VLLM_API_KEY" in started[3]) == is_warned


def test_taken_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "no_run", "--port", port]) == 2
    error = capsys.readouterr().err
    assert "Address already in use" in error and port in error and "no_run" not in error


SERVE = """
import sys
from alphaapollo.cli.serve import run_server
from alphaapollo.processes.entry_point import entry_point

@entry_point
def main(argv=None):
    port, grace, *command = sys.argv[1:]
    return run_server([*command, port], {}, ("127.0.0.1", int(port)), "it listens", float(grace))

sys.exit(main())
"""
STUCK_SERVER = """
import os, signal, socket, sys, time
os.fork()
signal.signal(signal.SIGTERM, lambda *_: print("it stays", flush=True))
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True)
time.sleep(300)
"""


@pytest.mark.parametrize(
    "signals", [[signal.SIGTERM, signal.SIGINT], [signal.SIGKILL]], ids=["second signal", "killed parent"]
)
def test_no_process_of_a_stuck_server_is_left(signals: list[signal.Signals], tmp_path: Path) -> None:
    """The server and its child process do not end at SIGTERM. The grace period is longer than the test's timeout."""
    (tmp_path / "serve.py").write_text(SERVE)
    command = [sys.executable, str(tmp_path / "serve.py"), str(find_free_port()), "1000"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", STUCK_SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "it listens\n"
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 2
        process.send_signal(signals[0])
        for number in signals[1:]:  # two signals of one moment are one KeyboardInterrupt
            assert process.stdout.readline() == "it stays\n"
            process.send_signal(number)
        assert process.wait(60) == (-signal.SIGKILL if signal.SIGKILL in signals else 130)
        assert not psutil.wait_procs(started, timeout=30)[1]
    finally:
        process.kill()


def test_serve_uses_the_default_context_if_the_model_supports_it(model: Path) -> None:
    config = GenerationConfig(model={"path": str(model)}, trainer={"device": "cpu"})
    prepared = ServePreparation(config, Console()).prepare()
    assert prepared.make_engine_spec().max_model_len <= DEFAULT_CONTEXT


def test_failed_export_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = newest_model.RunModel(tmp_path, tmp_path / "out", tmp_path / "step_1")
    monkeypatch.setattr(newest_model.subprocess, "run", lambda *args, **named: type("Done", (), {"returncode": 1}))
    with pytest.raises(ValueError, match="could not be exported"):
        newest_model.export_newest_model(newest)


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
