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
from alphaapollo.tools.base import ToolCall
from alphaapollo.types import Prompt, Score

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


TAGGED = {"role": "user", "content": '<tool_response>{"status": "ok", "text": "3"}</tool_response>'}


@pytest.mark.parametrize(
    ("action_format", "call", "answer", "message"),
    [
        ("tags", '<add>{"a": 1, "b": 2}</add>', "<answer>3</answer>", TAGGED),
        ("chat_template", 'add {"a": 1, "b": 2}', "3", {"role": "tool", "content": "3", "name": "add"}),
    ],
)
def test_call_and_answer(action_format, call, answer, message):
    called, answered = play(config(action_format=action_format), call, answer)
    assert called.observation.messages == [message] and answered.score == Score(1.0)


def test_selected_tools():
    async def run() -> str:
        box = await open_toolbox(config("count", "add", tools=["python_code"]))
        try:
            assert box.names == ["add", "count", "python_code"]
            return make_tag_instruction(box)
        finally:
            await box.close()

    assert '<add>{"a": 1, "b": 0}</add> (Add two numbers.)' in asyncio.run(run())


def server_keys(**servers: dict[str, Any]) -> Env:
    return Env(
        env_name="informal_math", mcp_servers={name: {"command": COMMAND} | keys for name, keys in servers.items()}
    )


@pytest.mark.parametrize(
    ("env", "fact"),
    [
        (server_keys(small={"command": ["/nowhere/server"]}), "MCP server small: .*nowhere/server.*Check the command"),
        (server_keys(small={"tools": ["ad"]}), r"mcp_servers\.small\.tools: .*'ad'\. Did you mean 'add'"),
        (server_keys(small={"command": []}), "small needs .*command and url"),
        (server_keys(a={}, b={}), "same name: add, draw, count, sleep"),
        (server_keys(small={"environment": ["NO_SUCH"]}), r"mcp_servers\.small\.environment: .*NO_SUCH"),
    ],
)
def test_invalid_servers(env, fact):
    with pytest.raises(ValueError, match=fact):
        asyncio.run(open_toolbox(env))
