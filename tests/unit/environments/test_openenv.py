"""Tests with a real OpenEnv server if the package is installed, else with a fake client."""

import asyncio
import importlib.util
import json
import socket
import subprocess
import sys
import textwrap
import time
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import check_environment
from alphaapollo.environments import openenv as adapter
from alphaapollo.launch.try_environment import try_environment_resets
from alphaapollo.types import Message, Prompt, Score
from alphaapollo.utils.time_limit import TimeLimit
from tests.unit import virtual_time
from tests.unit.environments.episode_helpers import check_results, make, play, random_agent

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


class ConnectionClosedOK(Exception):
    """Fake of websockets' exception: the server closed the connection before the client could send."""


class Client:
    """Fake of openenv.core.generic_client.GenericEnvClient 0.3, with the environment above."""

    free, refused = 8, 0  # sessions of the server

    def __init__(self, base_url: str, message_timeout_s: float):
        self.closed, self.open = False, False
        self.url, self.message_timeout_s = base_url, message_timeout_s

    async def reset(self, **kwargs):
        if "dead" in self.url:
            raise ConnectionError(f"Failed to connect to {self.url}")
        if not Client.free:
            Client.refused += 1
            if Client.refused % 2:
                raise ConnectionClosedOK()
            raise RuntimeError("Server error: Maximum concurrent sessions (8) reached (code: CAPACITY_REACHED)")
        Client.free -= 1
        self.left, self.open = 3, True
        return SimpleNamespace(observation={"text": f"start {kwargs['seed'] % 2}"}, reward=None, done=False)

    async def step(self, action, **kwargs):
        json.dumps(action, ensure_ascii=False).encode()
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
        Client.free += self.open
        self.closed, self.open = True, False


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


def env(url: str, prompt: str = "", **settings) -> Env:
    openenv = {"url": url, "observation_field": "text", **settings}
    return Env(env_name="openenv", prompt=prompt, max_steps=5, openenv=openenv)


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


def test_session(url):
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


def test_errors_are_raised(url):
    with pytest.raises(RuntimeError):
        run(env(url), "<answer>raise</answer>")
    with pytest.raises(KeyError, match=r"observation_field=board is unknown.*text"):
        run(env(url, observation_field="board"), "")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ('{"message": 7.5}', "invalid action: the environment rejects this action"),
        ('{"colour": "red"}', "invalid action: the environment rejects this action"),
        (r'{"message": "half \ud83d"}', "invalid action: the action contains a lone surrogate"),
    ],
)
def test_rejected_action_is_an_invalid_turn(url, action, said):
    _, (bad, good) = run(env(url), f"<answer>{action}</answer>", "<answer>hello</answer>")
    assert not bad.valid and not bad.done and bad.observation.messages[0]["content"].startswith(said)
    assert good.valid and good.observation.messages[0]["content"] == "echo hello"


def test_episodes_wait_for_free_sessions(url, monkeypatch):
    monkeypatch.setattr(adapter, "FIRST_WAIT", 0.01)

    async def play_one() -> float:
        environment = make(env(url))
        try:
            await environment.reset(row())
            return (await environment.step("<answer>win</answer>")).score.reward
        finally:
            await environment.close()

    async def go():
        return await asyncio.gather(*(play_one() for _ in range(20)))

    assert asyncio.run(go()) == [1.0] * 20  # on 8 sessions


@pytest.mark.parametrize(("ours", "left"), [(1, 10.0), (0, 0.0)])
def test_wait_for_own_episodes_is_not_counted(url, monkeypatch, ours, left):
    """A session is in use for a minute, by an episode of this process or by another client."""

    async def go() -> float:
        clock, (first, second) = TimeLimit(10.0), (make(env(url)), make(env(url)))
        for environment in (first, second):
            environment._connect = partial(Client, url, 10.0)
            environment._client = environment._connect()
        monkeypatch.setattr(Client, "free", 1)
        if ours:
            await first.reset(row())
        monkeypatch.setattr(Client, "free", 0)
        asyncio.get_running_loop().call_later(60, lambda: setattr(Client, "free", 1))
        try:
            async with clock.count_time():
                await second.reset(row())
        except TimeoutError:
            return 0.0
        finally:
            await first.close()
            await second.close()
        return clock.seconds_left

    assert virtual_time.run(go()) == left


def test_message_timeout_is_the_episode_timeout(url):
    environment = make(Env(env_name="openenv", episode_timeout=77.0, openenv={"url": url}))
    assert 77.0 in vars(environment._client).values()


def test_unreachable_server(url):
    dead = "http://dead" if not REAL else "http://127.0.0.1:1"
    with pytest.raises(
        ValueError,
        match=r"env\.env_name=openenv, row 0: .*: OpenEnvEnvironment.reset: ConnectionError: Failed to connect",
    ):
        asyncio.run(try_environment_resets(env(dead), [row()]))
    asyncio.run(try_environment_resets(env(url), [row(), row(1)]))


def test_random_agent(url):
    for seed in range(50 if REAL else 300):
        agent = random_agent(seed)
        results = play(env(url), lambda environment, seen, agent=agent: _harmless(agent(environment, seen)), row(seed))
        assert all(0.0 <= result.reward <= 0.25 for result in results)
        if results[-1].done:
            check_results(results, 5)


def _harmless(text: str) -> str:
    return text.replace("raise", "")


def test_check(monkeypatch):
    check_environment(env("http://localhost:8000"))
    with pytest.raises(ValueError, match=r"env\.openenv\.url is empty"):
        check_environment(env(""))
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[openenv\]'"):
        check_environment(env("x"))
