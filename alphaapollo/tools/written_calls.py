"""Calls that a model makes in the format it was trained with: what a parser finds in its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Call:
    """Example: `Call("python_code", '{"code": "6*7"}')`. Nothing of it is checked yet: that is the ToolBox's."""

    name: str
    arguments: str  # JSON, if the model wrote some


class UnreadableCallError(ValueError):
    """The model tried to call something, and the parser cannot read it. Says why, to the model."""


ReadCalls = Callable[[str], list[Call]]
"""A turn's text, special tokens with it -> its calls in order; without one it is an answer.

UnreadableCallError: it has a call that cannot be read."""


def without_thoughts(text: str) -> str:
    """What follows the last thought: nothing, where one was never closed.

    >>> without_thoughts("<think>f()?</think> g()")
    ' g()'
    """
    said = text.rpartition(THOUGHT)[2]
    return said.partition(THINK)[0]
