"""Collection of tools that validates calls, applies limits and runs them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import jsonschema

from alphaapollo.config.schema.env import ToolLimits
from alphaapollo.processes.time_limit import exclude_from_time_limit
from alphaapollo.tools.base import Session, Tool, ToolFailedError, ToolResult, ToolStatus, cut_middle
from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.registry import suggest_similar

MAX_ARGUMENT_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class ToolBox:
    """Tools of a process, shared by all episodes. Bound to one event loop. Raises ValueError if two tools have the same
    name, or a schema is invalid.

    limits: limits per tool. `max_concurrent` counts the calls of all episodes; timeouts exclude waiting for a slot.
    """

    def __init__(self, tools: Sequence[Tool], limits: ToolLimits):
        self._tools = {tool.name: tool for tool in tools}
        counts = Counter(tool.name for tool in tools)
        if duplicates := [name for name, count in counts.items() if count > 1]:
            raise ValueError(
                f"several tools have the same name: {', '.join(duplicates)}. Rename or exclude all but one."
            )
        self._limits = limits
        self._slots = {name: asyncio.Semaphore(limits.max_concurrent) for name in self._tools}
        self._validators = {name: _make_validator(tool) for name, tool in self._tools.items()}

    @property
    def names(self) -> list[str]:
        return sorted(self._tools)

    def schemas(self) -> list[JsonObject]:
        """Return the JSON schemas of all tools, as chat templates and OpenAI-compatible servers expect them."""
        functions = [
            tool.function_schema or {"name": name, "description": tool.description, "parameters": tool.parameters}
            for name, tool in sorted(self._tools.items())
        ]
        return [{"type": "function", "function": function} for function in functions]

    async def call_text(self, name: str, text: str, session: Session) -> ToolResult:
        """Call a tool with its tag's text: the value of `text_argument` or, for a tool without it, a JSON object."""
        argument = self._tools[name].text_argument if name in self._tools else None
        return await self.call(name, {argument: text} if argument else text, session)

    async def call(self, name: str, arguments: JsonObject | str, session: Session) -> ToolResult:
        """Call a tool. `arguments`: a dict, or a JSON object as text. If the model made a mistake, the ToolResult
        explains it. Raises ToolFailedError if the tool fails twice."""
        start = time.monotonic()
        parsed_or_error = self._parse_arguments(name, arguments)
        if isinstance(parsed_or_error, str):
            return ToolResult(parsed_or_error, ToolStatus.REFUSED, seconds=time.monotonic() - start)
        with exclude_from_time_limit():
            await self._slots[name].acquire()
        try:
            start = time.monotonic()
            try:
                result = await self._call_once(name, parsed_or_error, session)
            except ToolFailedError as error:
                logger.warning("the tool call failed and is retried: %s", error)
                result = await self._call_once(name, parsed_or_error, session)
        finally:
            self._slots[name].release()
        text = result.text.encode("utf-8", "replace").decode()  # tokenizers and logs reject lone surrogates
        text = cut_middle(text, self._limits.max_output)
        return replace(result, text=text, seconds=time.monotonic() - start)

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.close()

    async def _call_once(self, name: str, arguments: JsonObject, session: Session) -> ToolResult:
        limit = self._limits.timeout
        try:
            async with asyncio.timeout(limit) as scope:
                with HEARTBEAT.record_call(f"tool {name}"):
                    return await self._tools[name].call(arguments, session)
        except ToolFailedError:
            raise
        except Exception as error:
            if not scope.expired():
                raise ToolFailedError(f"{name}: {type(error).__name__}: {error}") from error
            return ToolResult(f"{name}: no answer within {limit:g} s", ToolStatus.TIMEOUT)

    def _parse_arguments(self, name: str, arguments: JsonObject | str) -> JsonObject | str:
        """Return the arguments of a tool call as a dict, or a message to the model (str) if they are invalid."""
        if name not in self._tools:
            hint = suggest_similar(name, self._tools)
            return f"unknown tool {name[:100]!r}.{hint} Known tools: {', '.join(self.names) or 'none'}."
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_ARGUMENT_BYTES:
            return f"{name}: {size} bytes of arguments, the limit is {MAX_ARGUMENT_BYTES}."
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                return f"{name}: the arguments are not JSON: {error}."
        schema_error = next(iter(self._validators[name].iter_errors(arguments)), None)
        if schema_error is not None:
            location = "".join(f" {part!r}" for part in schema_error.absolute_path)
            arguments_of_tool = ", ".join(self._tools[name].parameters.get("properties", {})) or "none"
            return (
                f"{name}: argument{location}: {cut_middle(schema_error.message, 500)}. Arguments: {arguments_of_tool}."
            )
        return arguments


def _make_validator(tool: Tool) -> jsonschema.protocols.Validator:
    """Return the jsonschema validator of a tool's arguments. Raises ValueError if the tool's schema is invalid."""
    cls = jsonschema.validators.validator_for(tool.parameters, default=jsonschema.Draft202012Validator)
    try:
        cls.check_schema(tool.parameters)
    except jsonschema.SchemaError as error:
        raise ValueError(f"the parameters of the tool {tool.name} are not a JSON schema: {error.message}.") from error
    if (kind := tool.parameters.get("type")) != "object":
        raise ValueError(f"the parameters of the tool {tool.name} must have the type 'object', not {kind!r}.")
    return cls(tool.parameters)
