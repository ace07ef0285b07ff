"""Tests with a real OpenEnv server if a Python installation has the package (OPENENV_PYTHON, or this one), else with a
fake server."""

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import check_environment
from alphaapollo.planning.trials import try_environment_resets
from alphaapollo.plugins.adapters import openenv as adapter
from alphaapollo.processes.time_limit import TimeLimit
from alphaapollo.types import Message, Score
from tests.processes import open_server
from tests.unit import virtual_time
from tests.unit.environments.episode_helpers import act, make, row, take_turns

PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)
REAL = not subprocess.run([PYTHON, "-c", "import openenv.core.env_server"], capture_output=True, check=False).returncode
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


FAKE_SERVER = """
import sys
from aiohttp import web

free = 8

async def session(request):
    global free
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async def fail(message, code):
        await socket.send_json({"type": "error", "data": {"message": message, "code": code}})
    if not free:
        await fail("Maximum concurrent sessions (8) reached", "CAPACITY_REACHED")
        await socket.close()
        return socket
    free -= 1
    async for frame in socket:
        asked = frame.json()
        said = asked["data"].get("message")
        if asked["type"] == "reset":
            left, seed = 3, asked["data"]["seed"]
            result = {"observation": {"text": f"start {seed % 2}"}, "reward": None, "done": False}
        elif not isinstance(said, str):
            await fail("message must be a text", "VALIDATION_ERROR")
            continue
        elif said == "raise":
            await fail("broken", "EXECUTION_ERROR")
            continue
        else:
            left, won = left - 1, said == "win"
            observation = {"text": f"echo {said}"}
            result = {"observation": observation, "reward": 1.0 if won else 0.25, "done": won or not left}
        await socket.send_json({"type": "observation", "data": result})
    free += 1
    return socket

app = web.Application()
app.router.add_get("/ws", session)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    script = tmp_path_factory.mktemp("server") / "server.py"
    script.write_text(SERVER if REAL else FAKE_SERVER)
    with open_server(PYTHON, script) as url:
        yield url


def env(url: str, prompt: str = "", **settings) -> Env:
    openenv = {"url": url, "observation_field": "text", **settings}
    return Env(env_name="openenv", prompt=prompt, max_steps=5, openenv=openenv)


def run(config: Env, *texts: str):
    first, results = take_turns(config, row(), *texts)
    return first.messages[0]["content"], results


def test_session(url):
    first, (step, end) = run(env(url), "<answer>hello</answer> and", "<answer>win</answer>")
    assert first.startswith("start ") and first.endswith("\n\nAct with <answer>...</answer>.")
    assert step.observation.messages == [Message(role="user", content="echo hello")]
    assert (step.reward, step.done, step.kept_chars) == (0.25, False, 22)
    assert end.done and end.score == Score(1.0) and end.reward == 0.0


def test_actions_and_observations(url):
    first, (step,) = run(env(url, prompt="> {observation}"), '<answer>{"message": "as it is"}</answer>')
    assert first.startswith("> start") and step.observation.messages[0]["content"] == "echo as it is"
    _, (step,) = run(env(url, action_field="colour"), "<answer>red</answer>")
    assert not step.valid and "message" in step.observation.messages[0]["content"]  # the field that this server needs
    _, (step,) = run(env(url, observation_field=""), "<answer>7</answer>")
    assert '"text": "echo 7"' in step.observation.messages[0]["content"]
    with pytest.raises(RuntimeError):
        run(env(url), "<answer>raise</answer>")
    with pytest.raises(KeyError, match=r"observation_field=board is unknown.*text"):
        run(env(url, observation_field="board"), "")


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("hello", "invalid action: no action"),
        ('<answer>{"message": 7.5}</answer>', "the environment rejects"),
        ('<answer>{"colour": "red"}</answer>', "the environment rejects"),
        (r'<answer>{"message": "half \ud83d"}</answer>', "lone surrogate"),
    ],
)
def test_rejected_action_is_an_invalid_turn(url, action, said):
    _, (bad, good) = run(env(url), action, "<answer>hello</answer>")
    assert not bad.valid and not bad.done and said in bad.observation.messages[0]["content"]
    assert good.valid and good.observation.messages[0]["content"] == "echo hello"


def test_episodes_wait_for_free_sessions(url, monkeypatch):
    monkeypatch.setattr(adapter, "FIRST_WAIT", 0.01)

    async def go():
        return await asyncio.gather(*(act(env(url), row(), "<answer>win</answer>") for _ in range(20)))

    assert [result.score.reward for _, (result,) in asyncio.run(go())] == [1.0] * 20  # on 8 sessions


@pytest.mark.parametrize(("ours", "left"), [(1, 10.0), (0, 0.0)])
def test_wait_for_own_episodes_is_not_counted(url, monkeypatch, ours, left):
    """A session is in use for a minute, by an episode of this process or by another client."""

    free = 1

    class Client:
        async def ws_connect(self, url: str, max_msg_size: int) -> None: ...
        async def close(self) -> None: ...

    async def request(self, request_type: str, data: dict) -> dict:
        if not free:
            raise adapter.ServerError("full", "CAPACITY_REACHED")
        return {"observation": {"text": ""}}

    def set_free(number: int) -> None:
        nonlocal free
        free = number

    monkeypatch.setattr(adapter, "aiohttp", SimpleNamespace(ClientSession=Client))
    monkeypatch.setattr(adapter.OpenEnvEnvironment, "_request", request)

    async def go() -> float:
        clock, (first, second) = TimeLimit(10.0), (make(env(url)), make(env(url)))
        if ours:
            await first.reset(row())
        set_free(0)
        asyncio.get_running_loop().call_later(60, set_free, 1)
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


def test_unreachable_or_missing_server(url):
    check_environment(env(url))
    with pytest.raises(ValueError, match=r"env\.openenv\.url is empty"):
        check_environment(env(""))
    with pytest.raises(ValueError, match=r"row 0: .*reset: ClientConnectorError"):
        asyncio.run(try_environment_resets(env("http://127.0.0.1:1"), [row()]))
    asyncio.run(try_environment_resets(env(url), [row(), row(1)]))
