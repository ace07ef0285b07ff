"""Turn functions into tools. The JSON schema of a tool is derived from the function's signature and docstring.

@tool
def add(a: int, b: int = 0) -> int:
    '''Add two numbers.

    Args:
        a: the first number.
        b: the second number.
    '''
    return a + b
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from alphaapollo.tools.base import Session, Tool, ToolFailedError, ToolResult, ToolStatus, tools
from alphaapollo.utils.json_types import JsonObject

F = TypeVar("F", bound=Callable[..., object])


def tool(function: F) -> F:
    """Register the decorated function as a tool for `env.tools`, under the name of the function."""
    created = FunctionTool(function)
    tools.register(created.name)(lambda: created)
    return function


class FunctionTool(Tool):
    """Tool that calls a Python function.

    A sync function runs in a thread, which a timeout cannot stop; slow functions should be async. Each parameter needs
    a type. A parameter named `session` receives the episode's Session; the model does not see it. The function returns
    a str, a JSON-serializable value or a ToolResult. Exceptions other than ToolFailedError become error messages for
    the model.

    Raises ValueError if the docstring is missing or a parameter has no type.
    """

    def __init__(self, function: Callable[..., object]):
        docstring = docstring_parser.parse(function.__doc__ or "")
        self.name = function.__name__
        self.description = (docstring.description or "").strip()
        if not self.description:
            raise ValueError(f"the tool {self.name} has no docstring. Add one that tells the model what the tool does.")
        self._function = function
        self._takes_session = "session" in inspect.signature(function).parameters
        texts = {entry.arg_name.lstrip("*"): " ".join((entry.description or "").split()) for entry in docstring.params}
        self._model = _make_arguments_model(function, texts)
        self.parameters = _build_schema(self._model)

    async def call(self, arguments: JsonObject, session: Session) -> ToolResult:
        try:
            parsed = self._model.model_validate(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(map(str, first["loc"]))
            return ToolResult(f"argument {location}: {first['msg']}", ToolStatus.REFUSED)
        values: dict[str, object] = {name: getattr(parsed, name) for name in self._model.model_fields}
        if self._takes_session:
            values["session"] = session
        try:
            is_async, function = inspect.iscoroutinefunction(self._function), self._function
            call: Any = function if is_async else partial(asyncio.to_thread, function)
            answer = await call(**values)
        except ToolFailedError:
            raise
        except Exception as error:  # noqa: BLE001  the model sees the exceptions of its call
            return ToolResult(f"{type(error).__name__}: {error}", ToolStatus.ERROR)
        if isinstance(answer, ToolResult):
            return answer
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
        return ToolResult(text, ToolStatus.OK)


def _make_arguments_model(function: Callable[..., object], descriptions: dict[str, str]) -> type[BaseModel]:
    """Return a pydantic model of a function's parameters. `descriptions`: {parameter: text from the docstring}."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "session":
            continue
        if name not in hints:
            raise ValueError(f"the tool {function.__name__}: argument {name} has no type. Add one, e.g. `{name}: str`.")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=descriptions.get(name) or None))
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _build_schema(model: type[BaseModel]) -> JsonObject:
    """Return the JSON schema of a pydantic model, without titles, which the language model does not need."""
    schema = model.model_json_schema()
    schema.pop("title", None)
    for argument in schema.get("properties", {}).values():
        argument.pop("title", None)
    return {"type": "object", "properties": {}, **schema}
