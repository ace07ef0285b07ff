"""Tool calls in the format of a chat template, as a parser reads them from a model's text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Unchecked call, e.g. `ToolCall("python_code", '{"code": "6*7"}')`; the ToolBox checks it."""

    name: str
    arguments: str  # JSON, if the model wrote valid JSON


class ToolCallParseError(ValueError):
    """The text contains a call that the parser cannot read. The message is for the model."""


ToolCallParser = Callable[[str], list[ToolCall]]
"""Text of a turn, with special tokens -> its calls in order; a text without a call is an answer.

Raises ToolCallParseError if it contains a call that cannot be read."""


def strip_thinking(text: str) -> str:
    """Text after the last thought; empty if a thought was not closed.

    >>> strip_thinking("<think>f()?</think> g()")
    ' g()'
    """
    return text.rpartition(THINK_END)[2].partition(THINK_START)[0]
