"""Random outputs of models: tool calls and actions."""

from __future__ import annotations

import asyncio
import json

from hypothesis import strategies as st

from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.environments.action_parser import read_action
from alphaapollo.rollout.tool_call_parser import make_tool_call_parser
from alphaapollo.tools.base import Session, ToolCallParseError, ToolCallParser
from alphaapollo.tools.function_tool import FunctionTool
from alphaapollo.tools.toolbox import ToolBox
from tests.fuzz.values import anything, texts
from tests.unit.tool_templates import RESPONSE_TEMPLATE, schema, tokenizer_of


def add(a: int, b: list[float] | None = None, note: str = "") -> str:
    """Add numbers.

    Args:
        a: a number
        b: more of them
        note: for people
    """
    return str(a + sum(b or [])) + note


def make_parser(parser: str) -> ToolCallParser:
    """Tool call parser of the tokenizer's response_template (""), or vLLM's parser of that name."""
    tokenizer = tokenizer_of()
    tokenizer.response_template = None if parser else RESPONSE_TEMPLATE
    return make_tool_call_parser(parser, ToolRenderer(tokenizer, [schema("add", a="integer")]))


DEEP = "[" * 20_000
NAMES = ["add", "sub", "", "ADD", "add ", "a\0", "\ud800", "__class__"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
ODD_ARGUMENTS = [
    "", "{", "}", "null", "1", DEEP, '{"a": ' + DEEP, '{"a": 1' + "0" * 5000 + "}", '{"a": NaN}', "x" * 100_000,
    '{"a": 1, "a": 2}', '{"a": "\\ud800"}', '{"a": 1e999}', "{'a': 1}", '{"a": 1}}', '{"a": 1, "b": [1e308, 1e308]}',
]  # fmt: skip
arguments = st.one_of(
    anything.map(json.dumps),
    st.dictionaries(st.sampled_from(["a", "b", "note", "c"]), anything, max_size=4).map(json.dumps),
    st.sampled_from(ODD_ARGUMENTS),
)
names = st.sampled_from(NAMES).map(json.dumps) | texts
calls_as_json = st.builds('{{"name": {}, "arguments": {}}}'.format, names, arguments)
marks = st.sampled_from([OPEN, CLOSE, "<think>", "</think>", "<answer>", "</answer>", "\n", DEEP])
pieces = st.lists(calls_as_json | texts | marks, max_size=6).map("".join)
turns = pieces | calls_as_json.map(lambda call: f"{OPEN}\n{call}\n{CLOSE}")


def call_tools(text: str, parse: ToolCallParser) -> str:
    """Any model output is an answer, an executed call, or a call with an error message."""
    read_action(text)
    try:
        calls = parse(text)
    except ToolCallParseError as error:
        assert str(error)
        return "unreadable"
    if not calls:
        return "answer"
    results = asyncio.run(_execute([(call.name, call.arguments) for call in calls]))
    return " ".join(sorted(set(results)))


def call_directly(name: str, given: str) -> str:
    (status,) = asyncio.run(_execute([(name, given)]))
    return status


async def _execute(calls: list[tuple[str, str]]) -> list[str]:
    box, session = ToolBox([FunctionTool(add)], ToolLimits(timeout=5.0, max_output=100)), Session()
    try:
        results = [await box.call(name, given, session) for name, given in calls]
    finally:
        await session.close()
        await box.close()
    for result in results:
        result.text.encode()
        assert len(result.text) < 1000 and result.text
    return [result.status.value for result in results]
