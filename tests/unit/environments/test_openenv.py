"""Against the package with a real server where it is installed, else against a client with the same surface."""

import asyncio
import importlib.util
import socket
import subprocess
import sys
import textwrap
import time
from types import ModuleType, SimpleNamespace

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import check_environment
from alphaapollo.environments import openenv as adapter
from alphaapollo.types import Message, Prompt, Score
from tests.unit.environments.playing import check_results, make, play, random_agent

REAL = importlib.util.find_spec("openenv") is not None
SERVER = """
import sys
import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.left, self.seed = 3, seed
        return Heard(text=f"start {seed % 2}", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "raise":
            raise ValueError("broken")
        self.left -= 1
        won = action.message == "win"
        return Heard(text=f"echo {action.message}", done=won or not self.left, reward=1.0 if won else 0.25)

    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8), host="127.0.0.1", port=int(sys.argv[1]))
"""


class Client:
    """As openenv.core.generic_client.GenericEnvClient in version 0.3, with the environment above behind it."""

    def __init__(self, base_url: str):
        self.closed = False

    async def reset(self, **kwargs):
        self.left = 3
        return SimpleNamespace(observation={"text": f"start {kwargs['seed'] % 2}"}, reward=None, done=False)

    async def step(self, action, **kwargs):
        if not isinstance(action.get("message"), str):
            raise RuntimeError("Server error: message must be a text (code: VALIDATION_ERROR)")
        if action["message"] == "raise":
            raise RuntimeError("Server error: broken (code: EXECUTION_ERROR)")
        self.left -= 1
        won = action["message"] == "win"
        return SimpleNamespace(
            observation={"text": f"echo {action['message']}"}, reward=1.0 if won else 0.25, done=won or not self.left
        )

    async def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    if not REAL:
        yield "http://nowhere"
        return
    script = tmp_path_factory.mktemp("server") / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(script), str(port)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(10)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    if not REAL:
        module = ModuleType("openenv.core.generic_client")
        vars(module).update(GenericEnvClient=Client)
        for name in ("openenv", "openenv.core"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "openenv.core.generic_client", module)
        monkeypatch.setattr(adapter, "find_spec", lambda name: object())


def env(url: str, **settings) -> Env:
    return Env(env_name="openenv", max_steps=5, openenv={"url": url, "observation_field": "text", **settings})


def row(id: int = 0) -> Prompt:
    return Prompt(id, "text", [Message(role="user", content="...")])


def run(config: Env, *texts: str):
    async def go():
        environment = make(config)
        try:
            first = await environment.reset(row())
            return first.messages[0]["content"], [await environment.step(text) for text in texts]
        finally:
            await environment.close()

    return asyncio.run(go())


def test_a_session(url):
    first, (step, end) = run(env(url), "<answer>hello</answer> and", "<answer>win</answer>")
    assert first.startswith("start ") and first.endswith("\n\nAct with <answer>...</answer>.")
    assert step.observation.messages == [Message(role="user", content="echo hello")]
    assert (step.reward, step.done, step.kept_chars) == (0.25, False, 22)
    assert end.done and end.score == Score(1.0) and end.reward == 0.0


def test_actions_and_observations(url):
    first, (step,) = run(env(url, prompt="> {observation}"), '<answer>{"message": "as it is"}</answer>')
    assert first.startswith("> start") and step.observation.messages[0]["content"] == "echo as it is"
    _, (step,) = run(env(url, observation_field=""), "<answer>7</answer>")
    assert '"text": "echo 7"' in step.observation.messages[0]["content"]
    _, (step,) = run(env(url), "hello")
    assert not step.valid and step.observation.messages[0]["content"].startswith("invalid action: no action")


def test_what_goes_wrong_there_is_raised_here(url):
    with pytest.raises(RuntimeError):
        run(env(url), "<answer>raise</answer>")
    with pytest.raises(KeyError, match=r"the observation has .*text"):
        run(env(url, observation_field="board"), "")


def test_whatever_a_model_writes(url):
    for seed in range(50 if REAL else 300):
        agent = random_agent(seed)
        results = play(env(url), lambda environment, seen, agent=agent: _printable(agent(environment, seen)), row(seed))
        assert all(0.0 <= result.reward <= 0.25 for result in results)
        if results[-1].done:
            check_results(results, 5)


def _printable(text: str) -> str:
    return text.replace("\ud800", "").replace("raise", "")


def test_checked_at_the_start(monkeypatch):
    check_environment(env("http://localhost:8000"))
    with pytest.raises(ValueError, match=r"env\.openenv\.url is empty"):
        check_environment(env(""))
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'alphaapollo\[openenv\]'"):
        check_environment(env("x"))
