"""A tool from a plain function: its schema is read off the signature and the docstring.

@tool
def add(a: int, b: int = 0) -> int:
    '''Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    '''
    return a + b
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from alphaapollo.tools.base import Session, ToolFailedError, ToolResult, ToolStatus, tools

F = TypeVar("F", bound=Callable[..., Any])

_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def function_tool(function: Callable[..., Any]) -> FunctionTool:
    """Make a tool of a function. Sync ones run in a thread, where nothing can stop them: let those that may take long
    be async.

    Each parameter needs a type; one that is named `session` gets the episode's Session and is no argument. The
    function returns a text, something that JSON can hold, or a ToolResult; what it raises becomes an error that the
    model sees, except ToolFailedError.

    ValueError: a parameter without a type, *args or **kwargs, or no docstring.
    """
    return FunctionTool(function)


def tool(function: F) -> F:
    """Register a function as a tool under its own name, for `env.tools`. It stays as it is."""
    made = function_tool(function)
    tools.register(made.name)(lambda: made)
    return function


class FunctionTool:
    """See function_tool."""

    text_argument: str | None = None

    def __init__(self, function: Callable[..., Any]):
        self.name = function.__name__
        self.description, descriptions = read_docstring(inspect.getdoc(function) or "")
        if not self.description:
            raise ValueError(f"tool {self.name}: it has no docstring, from which the model could know what it does.")
        self._function = function
        self._takes_session = "session" in inspect.signature(function).parameters
        self._model = _arguments_model(function, descriptions)
        self.parameters = _schema(self._model)

    async def call(self, arguments: dict[str, Any], session: Session) -> ToolResult:
        try:
            parsed = self._model.model_validate(arguments)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            return ToolResult(f"argument {where}: {problem['msg']}", ToolStatus.REFUSED)
        values: dict[str, Any] = {name: getattr(parsed, name) for name in self._model.model_fields}
        if self._takes_session:
            values["session"] = session
        try:
            if inspect.iscoroutinefunction(self._function):
                answer = await self._function(**values)
            else:
                answer = await asyncio.to_thread(self._function, **values)
        except ToolFailedError:
            raise
        except Exception as error:  # noqa: BLE001  the model called it so; it is shown what came of it
            return ToolResult(f"{type(error).__name__}: {error}", ToolStatus.ERROR)
        if isinstance(answer, ToolResult):
            return answer
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
        return ToolResult(text, ToolStatus.OK)

    async def close(self) -> None:
        return None


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring in Google's style says before its sections, and of each argument."""
    about: list[str] = []
    arguments: dict[str, str] = {}
    section, current, indent = "", "", 0
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section = match[1]
        elif not section:
            about.append(line)
        elif section in ("Args", "Arguments"):
            found = _ARGUMENT.match(line)
            if found and (not current or len(found[1]) <= indent):
                indent, current = len(found[1]), found[2]
                arguments[current] = found[3].strip()
            elif current and line.strip():
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return "\n".join(about).strip(), arguments


def _arguments_model(function: Callable[..., Any], descriptions: dict[str, str]) -> type[BaseModel]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "session":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {function.__name__}: {parameter} cannot be given by name; write each argument out.")
        if name not in hints:
            raise ValueError(
                f"tool {function.__name__}: argument {name} has no type; write `{name}: str`, for example."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=descriptions.get(name)))
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    schema.pop("title", None)
    for argument in schema.get("properties", {}).values():
        argument.pop("title", None)
    return {"type": "object", "properties": {}, **schema}
