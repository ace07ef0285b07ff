"""What a tool is: it has a name, says what it takes, and answers a call with a ToolResult.

    model's text -> ToolBox (toolbox.py: checks, limits) -> Tool.call(arguments, session) -> ToolResult -> model

A plain function becomes one with `function_tool` (function_tool.py); `tool` registers it for `env.tools`.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from pydantic import ConfigDict, TypeAdapter, ValidationError

from alphaapollo.utils.registry import Registry


class ToolStatus(StrEnum):
    """What came of a call. A tool that itself breaks has none of these: it raises ToolFailedError."""

    OK = "ok"
    ERROR = "error"  # the call was carried out and failed: an exception in the code, no such document
    TIMEOUT = "timeout"
    REFUSED = "refused"  # not carried out: unknown tool, broken or wrong arguments


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Example: `ToolResult("42\\n", ToolStatus.OK, seconds=0.01)`."""

    text: str  # what the model is shown
    status: ToolStatus
    score: float | None = None  # how good the tool itself finds it, where it knows: local_rag gives its best hit's
    seconds: float = 0.0


class ToolFailedError(RuntimeError):
    """The tool broke, through no fault of the call: a server died, the sandbox does not start. Nothing that the model
    did is to be judged by it; for an environment it is a failure of its infrastructure."""


class Session:
    """What tools keep between the calls of one episode. Closed with the episode."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.state: dict[str, Any] = {}  # a tool uses its own name as key
        self._closers: list[Callable[[], Awaitable[None] | None]] = []

    def on_close(self, closer: Callable[[], Awaitable[None] | None]) -> None:
        """Have `closer` called once when the episode ends; the last one given comes first."""
        self._closers.append(closer)

    async def close(self) -> None:
        while self._closers:
            waiting = self._closers.pop()()
            if inspect.isawaitable(waiting):
                await waiting


class Tool(Protocol):
    """Anything with these. `parameters` is a JSON schema of type object; calls arrive checked against it."""

    name: str
    description: str
    parameters: dict[str, Any]
    text_argument: str | None
    """The argument that a call's plain text is, e.g. `code` in `<python_code>print(1)</python_code>`; None: calls are
    JSON objects."""

    async def call(self, arguments: dict[str, Any], session: Session) -> ToolResult:
        """Carry out one call. Awaits whatever takes time. ToolFailedError: the tool is broken."""
        ...

    async def close(self) -> None:
        """Free what it holds. Called once, at the end of the run."""
        ...


tools: Registry[Callable[..., Tool]] = Registry("tool")
"""name -> what makes the tool from its settings, given as keyword arguments."""


def make_tools(names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> list[Tool]:
    """The tools of these names, each with its own settings.

    ValueError: an unknown name, or a setting that the tool does not have, that it lacks, or that is of another type.
    """
    made = []
    for name in names:
        factory = tools.get(name)
        made.append(factory(**_checked(name, factory, settings.get(name, {}))))
    return made


def _checked(name: str, factory: Callable[..., Tool], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, in the types that the factory's signature says."""
    known, key = inspect.signature(factory, eval_str=bool(given)).parameters, f"env.tool_settings.{name}"
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"tool {name}: no setting {', '.join(unknown)}; it has {', '.join(known) or 'none'}.")
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one for one, its in known.items() if its.default is its.empty and its.kind not in many]
    if missing := [one for one in needed if one not in given]:
        raise ValueError(f"tool {name}: it needs {', '.join(missing)}. Set {key}.{missing[0]}.")
    lax = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)
    checked = {}
    for one, value in given.items():
        kind = known[one].annotation
        try:
            checked[one] = TypeAdapter(Any if kind is inspect.Parameter.empty else kind, config=lax).validate_python(
                value
            )
        except ValidationError as error:
            raise ValueError(f"{key}.{one}={value}: {error.errors()[0]['msg']}.") from error
    return checked


def cut_middle(text: str, limit: int) -> str:
    """At most `limit` characters of a text, from its beginning and its end, and a note of what is missing.

    >>> cut_middle("abcdefgh", 4)
    'ab\\n... [4 characters cut] ...\\ngh'
    """
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]}\n... [{len(text) - limit} characters cut] ...\n{text[len(text) - tail :]}"
