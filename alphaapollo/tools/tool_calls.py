"""Tool calls in the model's native format (chat template), as returned by a parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Parsed tool call, not yet validated, e.g. `ToolCall("python_code", '{"code": "6*7"}')`."""

    name: str
    arguments: str  # JSON, if the model wrote valid JSON


class ToolCallParseError(ValueError):
    """Error: the text contains a call that cannot be parsed. The message is shown to the model."""


ToolCallParser = Callable[[str], list[ToolCall]]
"""Function: text of a turn with special tokens -> tool calls in order. An empty list means that the text is an answer.

Raises ToolCallParseError if the text contains a call that cannot be parsed."""


def strip_thinking(text: str) -> str:
    """Return the text after the thinking part, or an empty string if the thinking part is not closed.

    >>> strip_thinking("<think>f()?</think> g()")
    ' g()'
    """
    return text.rpartition(THINK_END)[2].partition(THINK_START)[0]
