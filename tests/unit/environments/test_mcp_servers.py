"""env.mcp_servers with a real server (tests/unit/tools/mcp_server.py)."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from alphaapollo.config.schema import Env, McpServer
from alphaapollo.environments import get_environment_spec
from alphaapollo.environments.base import Services, StepResult
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.environments.informal_math import make_tag_instruction
from alphaapollo.tools.tool_calls import ToolCall
from alphaapollo.types import Outcome, Prompt, Score

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "tools" / "mcp_server.py")]
PROMPT = Prompt(0, "math", "1+2?", ground_truth="3")


def config(*offered: str, command: list[str] = COMMAND, **settings: Any) -> Env:
    servers = {"small": McpServer(command=command, tools=list(offered))}
    plain = {"enable_python_code": False}
    return Env(env_name="informal_math", informal_math=plain, mcp_servers=servers, **settings)


async def grade(prompt: Prompt, text: str) -> Score:
    return Score(float(prompt.ground_truth in text))


def play(env: Env, *actions: str) -> list[StepResult]:
    async def run() -> list[StepResult]:
        box = await open_toolbox(env)
        assert box is not None

        def parse_calls(text: str) -> list[ToolCall]:
            return [ToolCall(*text.split(" ", 1))] if "{" in text else []

        try:
            environment = get_environment_spec("informal_math").factory(Services(grade, env, box, parse_calls))
            await environment.reset(PROMPT)
            return [await environment.step(action) for action in actions]
        finally:
            await box.close()

    return asyncio.run(run())


def refused(env: Env, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        asyncio.run(open_toolbox(env))


def test_call_in_tags():
    called, answered = play(config(), '<add>{"a": 1, "b": 2}</add>', "<answer>3</answer>")
    assert called.observation.messages[0]["content"] == '<tool_response>{"status": "ok", "text": "3"}</tool_response>'
    assert answered.score == Score(1.0)


def test_call_in_the_chat_template_format():
    called, answered = play(config(action_format="chat_template"), 'add {"a": 1, "b": 2}', "3")
    assert called.observation.messages == [{"role": "tool", "content": "3", "name": "add"}]
    assert answered.score == Score(1.0)


def test_selected_tools():
    async def run() -> str:
        box = await open_toolbox(config("count", "add", tools=["python_code"]))
        try:
            assert box.names == ["add", "count", "python_code"]
            return make_tag_instruction(box)
        finally:
            await box.close()

    assert 'call <add>{"a": 1, "b": 0}</add> (Add two numbers.),' in asyncio.run(run())


def test_server_that_dies_twice_is_an_environment_failure():
    env = config("die", "count")
    counted, died, counted_again = play(env, "<count>{}</count>", "<die>{}</die>", "<count>{}</count>")
    assert died.done and died.score.outcome is Outcome.ENVIRONMENT_FAILED
    assert all(fact in died.score.reason for fact in ("MCP server small", "Connection closed", "cannot go on"))
    assert [call["status"] for call in died.info["tool_calls"]] == ["failed"]
    for result in (counted, counted_again):
        assert '"text": "1"' in result.observation.messages[0]["content"]


def test_invalid_servers():
    refused(config(command=["/nowhere/server"]), "MCP server small: .*nowhere/server.*Check the command")
    refused(config("ad"), r"mcp_servers\.small\.tools: .*'ad'\. Did you mean 'add'")
    refused(config(command=[]), "small needs .*command and url")
    two = config("add").model_copy(update={"mcp_servers": {name: McpServer(command=COMMAND) for name in ("a", "b")}})
    refused(two, "same name: add, draw, count, sleep")
    closed = config().model_copy(update={"mcp_servers": {"small": McpServer(command=COMMAND, environment=["NO_SUCH"])}})
    refused(closed, r"mcp_servers\.small\.environment: .*NO_SUCH")
