"""Where the calls that a model writes arrive: looked up, checked, limited, carried out."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jsonschema

from alphaapollo.observability.spans import SPANS
from alphaapollo.tools.base import Session, Tool, ToolFailedError, ToolResult, ToolStatus, cut_middle
from alphaapollo.utils.registry import nearest
from alphaapollo.utils.time_limit import queueing

logger = logging.getLogger(__name__)


class Closable(Protocol):
    async def close(self) -> None: ...


@dataclass(frozen=True)
class ToolLimits:
    """Of the calls of one tool, over all episodes of a process."""

    timeout: float = 30.0
    """Seconds a call may take. Waiting for its turn does not count."""
    max_concurrent: int = 32
    """Calls at work at a time."""
    max_output: int = 8192
    """Characters of an answer; more are cut from its middle."""
    max_arguments: int = 1 << 16
    """Bytes of a call's arguments."""


class ToolBox:
    """The tools of a process. Calls of many episodes may run at once; they belong to one event loop.

    Args:
        tools: by their names, which must differ.
        limits: of each of them.
        limits_of: where one has its own, by name.
        owns: what is closed after the tools: what they share, e.g. the connection to a server.

    Raises ValueError for two tools of one name, limits of an unknown tool, or a schema that is none.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        limits: ToolLimits,
        limits_of: Mapping[str, ToolLimits] | None = None,
        owns: Sequence[Closable] = (),
    ):
        self._tools = {tool.name: tool for tool in tools}
        self._owns = owns
        counts = Counter(tool.name for tool in tools)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"several tools are named {', '.join(twice)}; offer one of each name.")
        if unknown := sorted(set(limits_of or {}) - set(self._tools)):
            raise ValueError(f"limits of unknown tools: {', '.join(unknown)}. Known: {', '.join(self.names)}.")
        self._limits = {name: (limits_of or {}).get(name, limits) for name in self._tools}
        self._turns = {name: asyncio.Semaphore(limit.max_concurrent) for name, limit in self._limits.items()}
        self._validators = {name: _validator(tool) for name, tool in self._tools.items()}

    @property
    def names(self) -> list[str]:
        return sorted(self._tools)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates and OpenAI-compatible servers take them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": self._tools[name].description,
                    "parameters": self._tools[name].parameters,
                },
            }
            for name in self.names
        ]

    async def call_text(self, name: str, text: str, session: Session) -> ToolResult:
        """A call as a tag holds it: JSON, or for a tool with a `text_argument` the text of that one."""
        argument = self._tools[name].text_argument if name in self._tools else None
        return await self.call(name, {argument: text} if argument else text, session)

    async def call(self, name: str, arguments: dict[str, Any] | str, session: Session) -> ToolResult:
        """Carry out one call. `arguments`: an object, or the JSON of one.

        Whatever a model may have written, the answer is a ToolResult that says what is wrong with it.
        ToolFailedError: the tool itself is broken; the call was tried twice.
        """
        start = time.monotonic()
        checked = self._check(name, arguments)
        if isinstance(checked, str):
            return ToolResult(checked, ToolStatus.REFUSED, seconds=time.monotonic() - start)
        limit = self._limits[name]
        with queueing():
            await self._turns[name].acquire()
        try:
            start = time.monotonic()
            result = await self._carry_out_or_again(name, checked, session)
        finally:
            self._turns[name].release()
        text = result.text.encode("utf-8", "replace").decode()  # lone surrogates end no tokenizer and no log
        return replace(result, text=cut_middle(text, limit.max_output), seconds=time.monotonic() - start)

    async def close(self) -> None:
        """Close all tools, and what is owned."""
        for closable in (*self._tools.values(), *self._owns):
            await closable.close()

    async def _carry_out_or_again(self, name: str, arguments: dict[str, Any], session: Session) -> ToolResult:
        try:
            return await self._carry_out(name, arguments, session)
        except ToolFailedError as error:
            logger.warning("%s; the call is tried once more", error)
            return await self._carry_out(name, arguments, session)

    async def _carry_out(self, name: str, arguments: dict[str, Any], session: Session) -> ToolResult:
        limit = self._limits[name].timeout
        try:
            async with asyncio.timeout(limit) as scope:
                with SPANS(f"tool {name}"):
                    return await self._tools[name].call(arguments, session)
        except ToolFailedError:
            raise
        except Exception as error:
            if not scope.expired():
                raise ToolFailedError(f"{name}: {type(error).__name__}: {error}") from error
            return ToolResult(f"{name}: no answer within {limit:g} s", ToolStatus.TIMEOUT)

    def _check(self, name: str, arguments: dict[str, Any] | str) -> dict[str, Any] | str:
        """The arguments, or what is wrong with the call."""
        if name not in self._tools:
            near = nearest(name[:100], self._tools, count=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return f"unknown tool {name[:100]!r}.{hint} Known tools: {', '.join(self.names) or 'none'}."
        limit = self._limits[name].max_arguments
        if (size := _size(arguments)) > limit:
            return f"{name}: {size} bytes of arguments, the limit is {limit}."
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                return f"{name}: the arguments are not JSON: {error}."
            except RecursionError:
                return f"{name}: the arguments are nested too deeply."
        if not isinstance(arguments, dict):
            return f"{name}: the arguments are not a JSON object but {_kind(arguments)}."
        problem = next(iter(self._validators[name].iter_errors(arguments)), None)
        if problem is not None:
            where = "".join(f" {part!r}" for part in problem.absolute_path)
            known = ", ".join(self._tools[name].parameters.get("properties", {})) or "none"
            message = cut_middle(problem.message, 500)
            return f"{name}: argument{where}: {message}. Arguments: {known}."
        return arguments


def _validator(tool: Tool) -> Any:
    kind = jsonschema.validators.validator_for(tool.parameters, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(tool.parameters)
    except jsonschema.SchemaError as error:
        raise ValueError(f"tool {tool.name}: its parameters are no JSON schema: {error.message}.") from error
    if tool.parameters.get("type") != "object":
        raise ValueError(
            f"tool {tool.name}: its parameters are not of type object but {tool.parameters.get('type')!r}."
        )
    return kind(tool.parameters)


def _size(arguments: dict[str, Any] | str) -> int:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    return len(text.encode("utf-8", "surrogatepass"))


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
