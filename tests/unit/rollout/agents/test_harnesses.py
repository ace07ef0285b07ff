"""Agents of other projects as real programs, against vLLM's HTTP API with canned answers. Their packages are not
requirements of this project."""

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from alphaapollo.config.schema import Agent
from alphaapollo.rollout.agents.runner import make_environment_variables
from tests.unit.rollout.agents.test_runner import run_program

HARNESSES = Path(__file__).parents[4] / "examples" / "agents" / "harnesses"
TASK = {"content": [{"role": "user", "content": "2+2=?"}], "ground_truth": "4"}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def run_program_of(server, file, answers, task=TASK, python=""):
    """Run a program of examples/agents/harnesses, with `python` as a command. Returns (session, rows)."""
    server.script.answers = answers
    path = str(HARNESSES / file)

    async def play(endpoint, session, client):
        agent = Agent(command=f"{python} {path}") if python else Agent(path=path)
        result = await run_program(agent, task, make_environment_variables(endpoint.url, session.token, "policy"))
        assert result.value == 1.0, (result, server.script.prompts[-1:])

    return server.run(play)


ADD = {"<tool_response>": "4", "2+2": call("add", a=2, b=2)}
HELPED = {
    "<tool_response>": "4",
    "add 2 and 2": call("add", a=2, b=2),
    "2+2": call("ask_helper", input="add 2 and 2"),
}


@pytest.mark.parametrize(
    ("package", "file", "answers", "turns"),
    [
        ("langgraph", "langgraph_agent.py", ADD, [2]),
        ("pydantic_ai", "pydantic_ai_agent.py", ADD, [2]),
        ("agents", "openai_agents.py", HELPED, [2, 2]),  # the main agent, and the helper
    ],
)
def test_each_growing_chat_is_a_row(server, package, file, answers, turns):
    pytest.importorskip(package, reason=f"install {package} to run this test")
    session, rows = run_program_of(server, file, answers)
    assert [len(row.turn_ends) for row in rows] == turns
    assert not any(one.request.difference for one in session.answers)


def test_smolagents_writes_tool_calls_as_text(server):
    pytest.importorskip("smolagents", reason="install smolagents to run this test")
    answers = {"Observation": call("final_answer", answer="4"), "New task": call("add", a=2, b=2)}
    session, rows = run_program_of(server, "smolagents_agent.py", answers)
    first, second = session.answers
    assert len(rows) == 2 and not first.request.difference
    assert all(part in second.request.difference for part in ('add({"a": 2, "b": 2})', "Calling tools:"))


@pytest.mark.skipif("MINI_SWE_PYTHON" not in os.environ, reason="set MINI_SWE_PYTHON to a Python with mini-swe-agent")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="install bubblewrap to run this test")
def test_mini_swe_agent(server, tmp_path, monkeypatch):
    for name in ("PYTHONPATH", "LC_ALL"):  # of this process, not of the sandbox
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    code, test = "def add(a, b):\n    return a - b\n", "import calc\nassert calc.add(2, 2) == 4\n"
    files = {"files": {"calc.py": code}, "tests": {"test_calc.py": test}, "test": "python3 -B test_calc.py"}
    task = {**TASK, "env_kwargs": files}
    answers = {
        "<returncode>0": call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        "<returncode>1": call("bash", command="sed -i s/-/+/ calc.py && python3 -B test_calc.py"),
        "2+2": call("bash", command="python3 -B test_calc.py"),
    }
    session, (row,) = run_program_of(server, "mini_swe_agent.py", answers, task, os.environ["MINI_SWE_PYTHON"])
    assert len(row.turn_ends) == 3 and not any(one.request.difference for one in session.answers)


@pytest.mark.skipif("VERIFIERS_PYTHON" not in os.environ, reason="set VERIFIERS_PYTHON to a Python that has verifiers")
def test_verifiers(server, tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = {**TASK, "env_kwargs": {"taskset": "sums", "index": 2}}
    python = os.environ["VERIFIERS_PYTHON"]
    session, (row,) = run_program_of(server, "verifiers_program.py", {"2+2": "4"}, task, python)
    assert len(row.turn_ends) == 1 and len(session.answers) == 1


SUMS = """
import verifiers.v1 as vf

__all__ = ["SumsTaskset"]

class Sum(vf.TaskData):
    answer: str

class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer == trace.last_reply)

class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield SumTask(Sum(prompt=f"{number}+{number}=?", answer=str(2 * number)), self.config.task)
"""
