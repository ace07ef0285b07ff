"""Agents of other projects as real programs, against vLLM's HTTP API with canned answers. Their packages are not
requirements of this project."""

import json
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
