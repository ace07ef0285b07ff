"""Tests with the verifiers library if a Python installation has it (VERIFIERS_PYTHON, or this one), else with a fake
server that speaks the same protocol."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.config.schema import Env
from alphaapollo.environments import check_environment
from alphaapollo.plugins.adapters import verifiers as adapter
from alphaapollo.types import Message, Prompt
from tests.unit.environments.episode_helpers import make, row, take_turns

PYTHON = os.environ.get("VERIFIERS_PYTHON", sys.executable)
REAL = not subprocess.run([PYTHON, "-P", "-c", "import verifiers.v1"], capture_output=True, check=False).returncode
ENVIRONMENT = '''
import verifiers.v1 as vf

__all__ = ["CountdownTaskset", "CountdownEnv"]

class CountdownData(vf.TaskData):
    answer: str

class CountdownTask(vf.Task[CountdownData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / trace.num_turns

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns

class CountdownConfig(vf.TasksetConfig):
    rows: int = 2

class CountdownTaskset(vf.Taskset[CountdownTask, CountdownConfig]):
    def load(self):
        print("environments may print")
        for i in range(self.config.rows):
            yield CountdownTask(CountdownData(prompt=f"{i} and 1?", answer=str(i + 1)), self.config.task)

class CountdownEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class CountdownEnv(vf.Env[CountdownEnvConfig]):
    """Ends at the correct answer or after four; counts the wrong ones."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for turn in range(1, 4):
                if segment.last_reply == "raise":
                    raise ValueError("broken")
                if segment.terminated or task.data.answer in segment.last_reply:
                    return
                segment = await interaction.turn(f"wrong {turn}")
'''
FAKE_SERVER = """
import asyncio, json, sys, threading, os
from aiohttp import web

arguments = json.loads(sys.argv[2])
if "colour" in arguments:
    print(json.dumps({"error": "ValidationError: colour"}), flush=True)
    sys.exit(1)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()

async def episode(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    row = int(request.match_info["index"]) % arguments.get("rows", 2)
    chat = [{"role": "user", "content": f"{row} and 1?"}]
    for turn in range(1, 5):
        await socket.send_json({"messages": chat})
        said = (await socket.receive_json())["answer"]
        if said == "raise":
            await socket.send_json({"reward": 0.0, "metrics": {}, "error": "EnvError: broken"})
        if str(row + 1) in said:
            break
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": f"wrong {turn}"}]
    right = 0.5 * (str(row + 1) in said)
    metrics = {"right": right, "brief": 0.5 / turn, "turns": turn}
    await socket.send_json({"reward": right + 0.5 / turn, "metrics": metrics, "error": ""})
    return socket

async def main():
    app = web.Application()
    app.router.add_get("/episode/{index}", episode)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("environments")
    (folder / "countdown.py").write_text(ENVIRONMENT)
    (folder / "server.py").write_text(FAKE_SERVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        if not REAL:
            patch.setattr(adapter, "SERVER", folder / "server.py")
        yield folder
    for process, _ in adapter._servers.values():
        process.stdin.close()
        assert process.wait(60) == 0
    adapter._servers.clear()


def env(name: str = "countdown", python: str = PYTHON, **args) -> Env:
    return Env(env_name="verifiers", max_steps=9, verifiers={"name": name, "args": args, "python": python})


def task(index: int = 0) -> Prompt:
    return row(extra_info={"index": index})


def test_several_turns():
    first, (wrong, right) = take_turns(env(), task(1), "1", "it is 2")
    assert first.messages == [Message(role="user", content="1 and 1?")]
    assert wrong.observation.messages == [Message(role="user", content="wrong 1")] and not wrong.done
    assert right.done and right.score.reward == 0.75
    assert right.score.components == {"right": 0.5, "brief": 0.25, "turns": 2}


def test_an_episode_ends_without_a_correct_answer():
    _, results = take_turns(env(), task(), "no", "", "no", "no")
    assert [result.done for result in results] == [False, False, False, True]
    assert results[-1].score.reward == 0.125


def test_errors_and_an_unfinished_episode_leave_the_server_usable():
    assert take_turns(env(rows=2), task(3))[0].messages[0]["content"] == "1 and 1?"  # 3 modulo 2; no turn is taken
    with pytest.raises(RuntimeError, match=r"countdown: EnvError: .*broken"):
        take_turns(env(rows=2), task(), "raise")
    assert take_turns(env(rows=2), task(), "1")[1][0].score.reward == 1.0


def test_concurrent_episodes():
    async def go():
        environments = [make(env()) for _ in range(4)]
        for index, environment in enumerate(environments):
            await environment.reset(task(index))
        results = await asyncio.gather(*(environment.step("it is 2") for environment in environments))
        for environment in environments:
            await environment.close()
        return [result.done for result in results]

    assert asyncio.run(go()) == [False, True, False, True]


def test_dead_server_is_an_error_and_is_restarted():
    config = env(rows=3)

    async def go():
        environment = make(config)
        await environment.reset(task())
        process = next(process for key, (process, _) in adapter._servers.items() if '"rows": 3' in key[-1])
        process.kill()
        process.wait()
        try:
            with pytest.raises((RuntimeError, OSError)):
                await environment.step("1")
        finally:
            await environment.close()

    asyncio.run(go())
    assert take_turns(config, task(), "1")[1][0].done


def test_check():
    check_environment(env())
    with pytest.raises(ValueError, match=r"env\.verifiers\.name is empty"):
        check_environment(Env(env_name="verifiers"))
    with pytest.raises(ValueError, match=r"args=\{'colour': 1\}(?s:.)*colour"):
        check_environment(env(colour=1))
    with pytest.raises(ValueError, match=r"env\.verifiers\.python=/no/python"):
        check_environment(env(python="/no/python"))


@pytest.mark.skipif(REAL, reason="verifiers is installed")
def test_missing_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapter, "SERVER", Path(adapter.__file__).with_name("verifiers_server.py"))
    with pytest.raises(ValueError, match=r"No module named .*needs verifiers 0\.4"):
        check_environment(env("other", python=sys.executable))
