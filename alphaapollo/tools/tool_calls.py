"""Types for parsers of tool calls that a model writes in the format of its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call that a model wrote, parsed but not validated, e.g. `ToolCall("python_code", '{"code": "6*7"}')`."""

    name: str
    arguments: str  # JSON, if the model wrote valid JSON


class ToolCallParseError(ValueError):
    """Error for a text with a tool call that cannot be parsed. The model sees the message."""


ToolCallParser = Callable[[str], list[ToolCall]]
"""Function: text of a turn with special tokens -> tool calls in order. An empty list means that the text is an answer.

Raises ToolCallParseError if the text contains a call that cannot be parsed."""


def strip_thinking(text: str) -> str:
    """Return the text after the thinking part, or an empty string if the thinking part is not closed.

    >>> strip_thinking("<think>f()?</think> g()")
    ' g()'
    """
    return text.rpartition(THINK_END)[2].partition(THINK_START)[0]
