"""Episodes of agents: programs in processes of their own, against a canned engine."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

from alphaapollo.config.schema import Agent, Data, Env
from alphaapollo.engines.types import EngineError
from alphaapollo.rollout.agents.programs import ProgramRunner
from alphaapollo.rollout.agents.runner import open_agent_runner
from alphaapollo.rollout.episode import EpisodeTask
from alphaapollo.types import EpisodeEnd, Outcome, Prompt, Sampling, Score
from tests.processes import wait_until
from tests.unit.rollout.agents.agents_kit import MAX_LENGTH

PROMPT = Prompt(7, "source", [{"role": "user", "content": "one"}], ground_truth="OK")
HEADER = """
import asyncio, os, subprocess, sys, time
from openai import OpenAI, AsyncOpenAI

def ask(endpoint, text="one", **options):
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=endpoint.model, messages=messages, **options)
"""
ASKS_CURL = (
    'curl -s $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" '
    '-H "Content-Type: application/json" -d \'{"model": "policy", "messages": [{"role": "user", "content": "one"}]}\''
)


def run(server, tmp_path, code="", grader=None, samples=1, limit_reward=None, **keys):
    """Run episodes of a program: `code`, or a function with the body `code`. Returns their trajectories."""
    if code:
        program = code if "def run(" in code else "def run(task, endpoint):\n" + indent(code, "    ")
        (tmp_path / "agent.py").write_text(HEADER + program)
        keys["path"] = str(tmp_path / "agent.py")
    agent = Agent(**keys)

    async def play():
        env = Env(env_name="agent", agent=agent, limit_reward=limit_reward)
        data = Data(max_prompt_length=1, max_response_length=MAX_LENGTH - 1)
        async with open_agent_runner(server, env, data, grader) as runner:
            tasks = [
                EpisodeTask(PROMPT, sample, None, Sampling(MAX_LENGTH), lambda seed: seed % 2**31, f"episode {sample}")
                for sample in range(samples)
            ]
            return await asyncio.gather(*map(runner.run, tasks))

    return asyncio.run(play())


async def run_program(agent: Agent, task: Any = None, variables: Any = None):
    """Result of a program without an episode."""
    programs = ProgramRunner(agent)
    try:
        await programs.start()
        return await programs.run(task or {}, variables or {})
    finally:
        await programs.close()


def find_processes(mark: str) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if mark in file.read_text():
                found.append(int(file.parent.name))
    return found


def test_reward_of_a_function(server, tmp_path):
    code = """
async def run(task, endpoint):
    client = AsyncOpenAI()  # from the environment variables
    messages = [{"role": "user", "content": "one"}]
    answer = await client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    endpoint.reward(answer.id, 0.25)
    return {"reward": 1.0, "right": float(answer.choices[0].message.content == task["ground_truth"])}
"""
    (one,) = run(server, tmp_path, code)
    assert one.end is EpisodeEnd.DONE and one.score == Score(1.0, {"right": 1.0})
    assert one.reward == 1.25 and one.prompt_id == 7
    assert [turn.text for turn in one.turns] == ["OK"] and len(one.rows) == 1
    assert one.first_observation == [{"role": "user", "content": "one"}]


def run_each(server, tmp_path, *bodies, **keys):
    """Run one episode of each body in the same host process."""
    branches = (f"if task['sample'] == {number}:\n{indent(body, '    ')}" for number, body in enumerate(bodies))
    return run(server, tmp_path, "\n".join(branches), samples=len(bodies), **keys)


def test_reward_of_a_command(server, tmp_path):
    (one,) = run(
        server, tmp_path, command=f"test -f $ALPHAAPOLLO_TASK && {ASKS_CURL} && echo 0.5 > $ALPHAAPOLLO_RESULT; echo 7"
    )
    assert (one.score.reward, one.end, len(one.rows)) == (0.5, EpisodeEnd.DONE, 1)
    (one,) = run(server, tmp_path, command="echo no such dataset >&2; exit 3")
    assert "exit code 3\nno such dataset" in one.score.reason


def test_graded_text_and_reward_of_the_program(server, tmp_path):
    async def grade(prompt, text, turns):
        assert len(turns) == 1
        return Score(float(text == "OK"), {"accuracy": 1.0})

    (one,) = run(server, tmp_path, "ask(endpoint); return 4", grade, grade=True)
    assert one.score == Score(5.0, {"accuracy": 1.0, "agent": 4.0})
    (one,) = run(server, tmp_path, "ask(endpoint)", grade, grade=True)
    assert one.score.reward == 1.0


FAILURES = [
    ("ask(endpoint); raise KeyError('boom')", "KeyError: 'boom'"),
    ("ask(endpoint)", "returned no reward"),
    ("ask(endpoint); return float('nan')", "the reward is nan"),
    ("ask(endpoint); return {'turn_rewards': [1.0, 2.0]}", "2 numbers for 1 answers"),
    ("ask(endpoint); return {'turn_rewards': [float('inf')]}", "turn_rewards[0] is inf"),
    ("endpoint.reward(ask(endpoint).id, float('nan')); return 1.0", "the reward is nan"),
    ("ask(endpoint); endpoint.reward('other', 1.0); return 1.0", "no such request"),
    ("return 1.0", "no answer from the policy"),
    ("ask(endpoint); os.kill(os.getpid(), 9)", "SIGKILL"),
    ("ask(endpoint); os._exit(3)", "ended without a result"),
    ("print('last words', file=sys.stderr); sys.exit(1)", "last words"),
]


def test_failures_are_no_rewards(server, tmp_path):
    trajectories = run_each(server, tmp_path, *(code for code, _ in FAILURES))
    for one, (code, reason) in zip(trajectories, FAILURES, strict=True):
        assert one.score.outcome is Outcome.ENVIRONMENT_FAILED and one.end is EpisodeEnd.ENVIRONMENT_FAILED, code
        assert reason in one.score.reason and "(attempt 2 of 2)" in one.score.reason, code


@pytest.mark.parametrize(("end", "timeout"), [("time.sleep(1000)", 3.0), ("return 1.0", 60.0)])
def test_processes_that_a_program_starts_are_ended(server, tmp_path, end, timeout):
    mark = f"{time.time()}"
    start = f'subprocess.Popen(["/bin/sh", "-c", "sleep 1000; echo {mark}"], start_new_session=True)'
    (one,) = run(server, tmp_path, f"ask(endpoint)\n{start}\n{end}", timeout=timeout)
    assert len(one.turns) == 1 and not find_processes(mark)
    if timeout == 3.0:
        assert one.end is EpisodeEnd.TIME_LIMIT and "env.agent.timeout=3 s" in one.score.reason
    else:
        assert one.reward == 1.0


def test_prompt_over_the_limit_is_no_failure(server, tmp_path):
    too_long = f"ask(endpoint, 'x' * {MAX_LENGTH})"
    first, one = run_each(server, tmp_path, too_long, f"ask(endpoint); {too_long}")
    assert first.end is EpisodeEnd.PROMPT_LIMIT and first.score.outcome.failed
    assert one.end is EpisodeEnd.TOKEN_LIMIT and one.score.reward == 0.0
    assert "no answer before the limit" in one.score.reason


CUT_BY_THE_SESSION = [  # programs that fail if an answer is incomplete
    "answer = ask(endpoint); assert answer.choices[0].finish_reason == 'stop'; return 1.0",
    "answer = OpenAI().responses.create(model='policy', input='one'); assert answer.status == 'completed'; return 1.0",
    "for part in ask(endpoint, stream=True):\n    assert part.choices[0].finish_reason != 'length'",
    "import pydantic\nPrice = pydantic.create_model('Price', price=int)\n"
    "OpenAI().chat.completions.parse(model='policy', messages=task['content'], response_format=Price)",
]


@pytest.mark.parametrize("limit_reward", [None, -0.5])
def test_program_that_fails_after_a_cut_answer_is_at_the_token_limit(server, tmp_path, limit_reward):
    server.script.answers = {"one": "{" + "x" * MAX_LENGTH}
    bodies = [f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n{body}" for body in CUT_BY_THE_SESSION]
    refused = "ask(endpoint)\nOpenAI().completions.create(model='x', prompt='one')"
    programs = *bodies, "ask(endpoint, max_tokens=1); raise KeyError", refused
    *found, failed, not_cut = run_each(server, tmp_path, *programs, limit_reward=limit_reward)
    server.script.answers = {}
    for one, code in zip(found, CUT_BY_THE_SESSION, strict=True):
        assert (one.end, one.reward, len(one.rows)) == (EpisodeEnd.TOKEN_LIMIT, limit_reward or 0.0, 1), code
        assert "cut the last answer" in one.score.reason
        (turn,) = one.turns
        assert turn.info["error"] in one.score.reason and "refused" not in turn.info and one.accuracy == 0.0
    assert (tmp_path / "runs").read_text() == "x" * len(found)
    assert failed.end is EpisodeEnd.ENVIRONMENT_FAILED  # the program's own limit cut its answer
    assert not_cut.end is EpisodeEnd.ENVIRONMENT_FAILED and not_cut.turns[0].info["refused"] == 1
    assert "refused 1 requests, the first with 404" in not_cut.score.reason


def test_engine_error_is_not_a_failure_of_the_agent(server, tmp_path, monkeypatch):
    def fail(prompt):
        raise EngineError("rollout engine 0 failed")

    monkeypatch.setattr(server.script, "answers", type("Failing", (dict,), {"items": fail})())
    with pytest.raises(EngineError, match="rollout engine 0"):
        run(server, tmp_path, "ask(endpoint); return 1.0")


SLOW_IMPORT = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\ntime.sleep(1000)\n"


@pytest.mark.parametrize("delay", [None, 0, 0.1])
def test_close_at_any_time_ends_the_host(delay, tmp_path):
    """delay: seconds after which the start is cancelled; None: it is closed directly after its start."""
    path = tmp_path / f"agent_{time.time()}.py"
    path.write_text("def run(task, endpoint): ...\n" if delay is None else SLOW_IMPORT)

    async def play():
        programs = ProgramRunner(Agent(path=str(path)))
        starting = asyncio.ensure_future(programs.start())
        await asyncio.wait((starting,), timeout=delay)
        starting.cancel()
        await asyncio.wait((starting,))
        assert starting.cancelled() is (delay is not None)
        await programs.close()
        await programs.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(play())
    assert not find_processes(path.name)


def test_command_that_kills_the_host_fails_its_episode_alone(server, tmp_path):
    mark = tmp_path / "killed"
    kill = (
        f"test -e {mark} || {{ touch {mark}; kill -9 $(cut -d' ' -f4 /proc/$(cut -d' ' -f4 /proc/$PPID/stat)/stat); }}"
    )
    (one,) = run(server, tmp_path, command=f"{ASKS_CURL} && echo 1 > $ALPHAAPOLLO_RESULT; {kill}")
    assert mark.exists() and one.score == Score(1.0)


def test_nothing_is_left_when_the_runner_dies(tmp_path):
    """A killed worker process leaves no program running."""
    mark = f"{time.time()}"
    (tmp_path / "worker.py").write_text(f"""
import asyncio, os, pathlib, signal
from alphaapollo.config.schema import Agent
from alphaapollo.rollout.agents.programs import ProgramRunner

async def main():
    programs = ProgramRunner(Agent(command="touch {tmp_path}/started; sleep 1000; echo {mark}"))
    await programs.start()
    running = asyncio.ensure_future(programs.run({{}}, {{}}))
    while not pathlib.Path("{tmp_path}/started").exists():
        await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
""")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    worker = subprocess.run([sys.executable, tmp_path / "worker.py"], env=environment, check=False, timeout=60)
    assert worker.returncode == -signal.SIGKILL
    assert wait_until(lambda: not find_processes(f"echo {mark}")), "a program is still running"
