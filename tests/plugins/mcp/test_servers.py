"""env.mcp_servers with a real server (mcp_server.py)."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from alphaapollo.config.schema import Env
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.environments.informal_math import make_tag_instruction
from alphaapollo.tools.base import ToolCall
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.types import Prompt, Score
from tests.unit.environments.episode_helpers import act, contains_truth

COMMAND = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


def config(servers: dict[str, dict[str, Any]], **settings: Any) -> Env:
    servers = {name: {"command": COMMAND} | keys for name, keys in servers.items()}
    maths = {"enable_python_code": False}
    return Env(env_name="informal_math", informal_math=maths, mcp_servers=servers, **settings)


def use_tools(env: Env, use: Callable[[ToolBox], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        box = await open_toolbox(env)
        assert box is not None
        try:
            return await use(box)
        finally:
            await box.close()

    return asyncio.run(main())


def parse_calls(text: str) -> list[ToolCall]:
    return [ToolCall(*text.split(" ", 1))] if "{" in text else []


TAGGED = {"role": "user", "content": '<tool_response>{"status": "ok", "text": "3"}</tool_response>'}


@pytest.mark.parametrize(
    ("action_format", "call", "answer", "message"),
    [
        ("tags", '<add>{"a": 1, "b": 2}</add>', "<answer>3</answer>", TAGGED),
        ("chat_template", 'add {"a": 1, "b": 2}', "3", {"role": "tool", "content": "3", "name": "add"}),
    ],
)
def test_call_and_answer_with_selected_tools(action_format, call, answer, message):
    env = config({"small": {"tools": ["count", "add"]}}, action_format=action_format, tools=["python_code"])

    async def play(box: ToolBox) -> Any:
        assert box.names == ["add", "count", "python_code"]
        assert '<add>{"a": 1, "b": 0}</add> (Add two numbers.)' in make_tag_instruction(box)
        services = {"score": contains_truth, "tools": box, "parse_calls": parse_calls}
        return await act(env, Prompt(0, "math", "1+2?", ground_truth="3"), call, answer, **services)

    _, (called, answered) = use_tools(env, play)
    assert called.observation.messages == [message] and answered.score == Score(1.0)


@pytest.mark.parametrize(
    ("servers", "fact"),
    [
        ({"small": {"command": ["/nowhere/server"]}}, "MCP server small: .*nowhere/server.*Check the command"),
        ({"small": {"tools": ["ad"]}}, r"mcp_servers\.small\.tools: .*'ad'\. Did you mean 'add'"),
        ({"small": {"command": []}}, "small needs .*command and url"),
        ({"a": {}, "b": {}}, "same name: add, draw, count, sleep"),
        ({"small": {"environment": ["NO_SUCH"]}}, r"mcp_servers\.small\.environment: .*NO_SUCH"),
    ],
)
def test_invalid_servers(servers, fact):
    with pytest.raises(ValueError, match=fact):
        asyncio.run(open_toolbox(config(servers)))
