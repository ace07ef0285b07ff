"""Tool protocol: a name, a JSON schema of the arguments, and an async method that returns a ToolResult.

    model's text -> ToolBox (toolbox.py: checks, limits) -> Tool.call(arguments, session) -> ToolResult -> model

`FunctionTool` (function_tool.py) turns a function into a tool. The decorator `tool` also registers it for `env.tools`.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from pydantic import ConfigDict, ValidationError, create_model

from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.plugins import find_plugins
from alphaapollo.utils.registry import Registry


class ToolStatus(StrEnum):
    """Outcome of a tool call. A tool that fails because of its own infrastructure raises ToolFailedError instead."""

    OK = "ok"
    ERROR = "error"  # the call ran and failed, e.g. an exception or an unknown document
    TIMEOUT = "timeout"
    REFUSED = "refused"  # the call did not run, e.g. unknown tool or invalid arguments


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call, e.g. `ToolResult("42\\n", ToolStatus.OK, seconds=0.01)`."""

    text: str  # text for the model
    status: ToolStatus
    score: float | None = None  # the tool's own rating, e.g. the score of local_rag's best hit
    seconds: float = 0.0
    images: Sequence[object] = ()  # images (environments/base.py), shown after the text if the model reads images


class ToolFailedError(RuntimeError):
    """Error for a failure of the tool's infrastructure, e.g. a dead server, as opposed to a mistake of the model."""


class Session:
    """State that tools keep between the calls of one episode. The environment closes it at the end of the episode."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.state: dict[str, Any] = {}  # tool name -> state
        self._closers: list[Callable[[], Awaitable[None] | None]] = []

    def on_close(self, closer: Callable[[], Awaitable[None] | None]) -> None:
        """Register a function to call at the end of the episode. Functions run in reverse order of registration."""
        self._closers.append(closer)

    async def close(self) -> None:
        while self._closers:
            result = self._closers.pop()()
            if inspect.isawaitable(result):
                await result


class Tool(Protocol):
    """Interface of all tools. `parameters` is a JSON schema of type object; the ToolBox validates calls with it."""

    name: str
    description: str
    parameters: JsonObject
    text_argument: str | None = None
    """Name of the argument that receives the text of a tag, e.g. `code` for `<python_code>print(1)</python_code>`.
    None: the text of a tag is a JSON object of all arguments."""
    function_schema: JsonObject | None = None
    """What the model sees of the tool. None: name, description and parameters."""

    async def call(self, arguments: JsonObject, session: Session) -> ToolResult:
        """Run one call, without blocking the event loop. Raises ToolFailedError if the tool itself fails."""
        ...

    async def close(self) -> None:
        """Free the resources of the tool. Called once, at the end of the run."""
        return


tools: Registry[Callable[..., Tool]] = Registry("tool")
"""Tool name -> factory whose keyword arguments are the tool's settings."""


def make_tools(names: Sequence[str], settings: Mapping[str, Mapping[str, object]]) -> list[Tool]:
    """Create the tools with these names, which are registered or belong to plug-ins or packages. `settings`: {tool
    name: {setting: value}}, from env.tool_settings. Raises ValueError if a name is unknown or belongs to a missing
    plug-in, or if a setting is unknown, missing or of the wrong type."""
    plugins, created = find_plugins("tools", built_in=("python_code",)), []
    for name in names:
        is_plugin = name in plugins and name not in tools
        factory = plugins[name].load() if is_plugin else tools.get(name, others=plugins)
        created.append(factory(**_validate_settings(name, factory, settings.get(name, {}))))
    return created


def _validate_settings(name: str, factory: Callable[..., Tool], settings: Mapping[str, object]) -> JsonObject:
    """Return a tool's settings converted to the types of its factory's parameters. Raises ValueError if invalid."""
    fields: dict[str, Any] = {}
    for setting, parameter in inspect.signature(factory, eval_str=bool(settings)).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            kind = parameter.annotation if settings and parameter.annotation is not parameter.empty else Any
            default = ... if parameter.default is parameter.empty else parameter.default  # pydantic's ...: required
            fields[setting] = kind, default
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, coerce_numbers_to_str=True)
    try:
        validated = create_model(name, __config__=model_config, **fields).model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        key = f"env.tool_settings.{name}.{first['loc'][0]}"
        value = "" if first["type"] == "missing" else f"={settings[str(first['loc'][0])]}"
        known = ", ".join(fields) or "none"
        raise ValueError(f"{key}{value}: {first['msg']}. Settings of this tool: {known}.") from error
    return {setting: getattr(validated, setting) for setting in settings}


def cut_middle(text: str, limit: int) -> str:
    """Cut characters from the middle of a text, so that `limit` remain. A note replaces the removed characters.

    >>> cut_middle("abcdefgh", 4)
    'ab\\n... [4 characters cut] ...\\ngh'
    """
    if len(text) <= limit:
        return text
    head, tail = (limit + 1) // 2, limit // 2
    return f"{text[:head]}\n... [{len(text) - limit} characters cut] ...\n{text[len(text) - tail :]}"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call that a model wrote, parsed but not validated, e.g. `ToolCall("python_code", '{"code": "6*7"}')`."""

    name: str
    arguments: str  # JSON, if the model wrote valid JSON
    content: str = field(default="", compare=False)  # text of the turn without its calls


class ToolCallParseError(ValueError):
    """Error for a text with a tool call that cannot be parsed. The model sees the message."""


ToolCallParser = Callable[[str], list[ToolCall]]
"""Function: text of a turn with special tokens -> tool calls in order. An empty list means that the text is an answer.

Raises ToolCallParseError if the text contains a call that cannot be parsed."""
