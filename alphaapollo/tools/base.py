"""Tool protocol: a name, a JSON schema of the arguments, and a method that answers a call with a ToolResult.

    model's text -> ToolBox (toolbox.py: checks, limits) -> Tool.call(arguments, session) -> ToolResult -> model

`function_tool` (function_tool.py) makes a tool of a plain function; `tool` also registers it for `env.tools`.
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
    """How a call ended. A tool that is broken has no status: it raises ToolFailedError."""

    OK = "ok"
    ERROR = "error"  # the call was made and failed: an exception in the code, no such document
    TIMEOUT = "timeout"
    REFUSED = "refused"  # the call was not made: unknown tool, invalid arguments


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Example: `ToolResult("42\\n", ToolStatus.OK, seconds=0.01)`."""

    text: str  # for the model
    status: ToolStatus
    score: float | None = None  # the tool's own rating, e.g. the score of local_rag's best hit
    seconds: float = 0.0


class ToolFailedError(RuntimeError):
    """The tool itself is broken: a server died, the sandbox does not start. The model is not to be judged by it; for an
    environment it is an infrastructure failure."""


class Session:
    """State of the tools between the calls of one episode. Closed with the episode."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.state: dict[str, Any] = {}  # by tool name
        self._closers: list[Callable[[], Awaitable[None] | None]] = []

    def on_close(self, closer: Callable[[], Awaitable[None] | None]) -> None:
        """Call `closer` once when the episode ends, in reverse order of registration."""
        self._closers.append(closer)

    async def close(self) -> None:
        while self._closers:
            waiting = self._closers.pop()()
            if inspect.isawaitable(waiting):
                await waiting


class Tool(Protocol):
    """Interface of all tools. `parameters` is a JSON schema of type object; calls are checked against it beforehand."""

    name: str
    description: str
    parameters: dict[str, Any]
    text_argument: str | None
    """The argument that the text of a tag becomes, e.g. `code` in `<python_code>print(1)</python_code>`. None: the text
    is a JSON object."""

    async def call(self, arguments: dict[str, Any], session: Session) -> ToolResult:
        """Make one call. Must await slow operations. Raises ToolFailedError if the tool is broken."""
        ...

    async def close(self) -> None:
        """Free its resources. Called once, at the end of the run."""
        ...


tools: Registry[Callable[..., Tool]] = Registry("tool")
"""name -> factory that takes the tool's settings as keyword arguments."""


def make_tools(names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> list[Tool]:
    """Make the tools of these names, each with its own settings.

    Raises ValueError for an unknown name, and for settings that are unknown, missing or of another type.
    """
    made = []
    for name in names:
        factory = tools.get(name)
        made.append(factory(**_convert_settings(name, factory, settings.get(name, {}))))
    return made


def _convert_settings(name: str, factory: Callable[..., Tool], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings to the types in the factory's signature."""
    known, key = inspect.signature(factory, eval_str=bool(settings)).parameters, f"env.tool_settings.{name}"
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"{key}: no setting {', '.join(unknown)}. Known: {', '.join(known) or 'none'}.")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [one for one, its in known.items() if its.default is its.empty and its.kind not in variadic]
    if missing := [one for one in required if one not in settings]:
        raise ValueError(f"the tool {name} needs the setting {', '.join(missing)}. Set {key}.{missing[0]}.")
    lax = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)
    checked = {}
    for one, value in settings.items():
        kind = known[one].annotation
        adapter: TypeAdapter[Any] = TypeAdapter(Any if kind is inspect.Parameter.empty else kind, config=lax)
        try:
            checked[one] = adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(f"{key}.{one}={value}: {error.errors()[0]['msg']}.") from error
    return checked


def cut_middle(text: str, limit: int) -> str:
    """At most `limit` characters of a text, half from each end, with a note about the rest.

    >>> cut_middle("abcdefgh", 4)
    'ab\\n... [4 characters cut] ...\\ngh'
    """
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]}\n... [{len(text) - limit} characters cut] ...\n{text[len(text) - tail :]}"
