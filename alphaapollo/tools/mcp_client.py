"""Tools of MCP servers, over stdio or HTTP, through the official package (extra `mcp`).

    server = McpServer("files", command=["npx", "-y", "some-server", "/data"])
    tools = await server.start()                 # as Tool objects, for a ToolBox
    ...
    await server.close()

One connection serves all episodes of a process. When it breaks, the calls under way fail as ToolFailedError and the
next call connects anew (a stdio server is started again; a ToolBox makes each of those calls once more). What such a
server kept in memory is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alphaapollo.tools.base import Session, ToolFailedError, ToolResult, ToolStatus

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as McpToolInfo

CONNECT_TIMEOUT = 60.0  # seconds to start a server and list its tools
CLOSE_TIMEOUT = 10.0
INVALID_PARAMETERS = -32602  # JSON-RPC: the server does not take these arguments


class McpServer:
    """One server: a program that speaks over its stdin and stdout, or an address. Lives on one event loop.

    Args:
        name: for messages.
        command: the program and its arguments, or
        url: the address of its streamable HTTP endpoint, e.g. "http://localhost:8000/mcp".
        environment: variables for the program; it gets few others.

    ValueError: both or none of `command` and `url`, or the package mcp is not installed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str] = (),
        url: str = "",
        environment: Mapping[str, str] | None = None,
    ):
        if bool(command) == bool(url):
            raise ValueError(f"MCP server {name}: give either its command or its url.")
        if importlib.util.find_spec("mcp") is None:
            raise ValueError(
                f"MCP server {name}: the package mcp is not installed; pip install -e '.[mcp]' in the clone."
            )
        self.name = name
        self._command = list(command)
        self._url = url
        self._environment = dict(environment or {})
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None

    async def start(self) -> list[McpTool]:
        """Connect, and list what the server offers (ValueError: it cannot be reached)."""
        try:
            connection = await self._connected()
        except ToolFailedError as error:
            raise ValueError(f"{error}. Is its {'command' if self._command else 'url'} right?") from error
        return [McpTool(self, info) for info in connection.tools]

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """ToolFailedError: the server cannot be reached, died, or answered nonsense."""
        from mcp import MCPError

        connection = await self._connected()
        try:
            answer = await connection.client.call_tool(tool, arguments)
        except (MCPError, OSError, ValueError) as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMETERS:
                return ToolResult(error.message, ToolStatus.ERROR)
            reason = f"MCP server {self.name}: {error}{connection.last_words()}"
            if connection is self._connection:
                self._connection = None
                await connection.close()
            raise ToolFailedError(reason) from error
        return ToolResult(text_of(answer), ToolStatus.ERROR if answer.is_error else ToolStatus.OK)

    async def close(self) -> None:
        """Disconnect; a program of ours is ended."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._connection is None:
                connection = _Connection(self._command, self._url, self._environment)
                try:
                    await connection.open()
                except ConnectionError as error:
                    raise ToolFailedError(f"MCP server {self.name}: {error}") from error
                self._connection = connection
            return self._connection


class _Connection:
    """A client inside a task of its own: it must be left by the task that entered it."""

    def __init__(self, command: list[str], url: str, environment: dict[str, str]):
        self._command = command
        self._url = url
        self._environment = environment
        self._leave = asyncio.Event()
        self._log: Any = tempfile.TemporaryFile("w+")  # noqa: SIM115  what a program writes to stderr; closed below
        self.client: Client
        self.tools: list[McpToolInfo] = []

    async def open(self) -> None:
        """ConnectionError: there is nobody, or nobody who speaks MCP."""
        ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(ready))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await asyncio.shield(ready)
        except TimeoutError as error:
            await self.close()
            raise ConnectionError(f"no connection within {CONNECT_TIMEOUT:g} s") from error
        except asyncio.CancelledError:  # the call that wanted it has run out of time: nobody would close it
            self._task.cancel()
            raise

    async def close(self) -> None:
        self._leave.set()
        done, _ = await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT)

    def last_words(self) -> str:
        """The last line that the program wrote to stderr."""
        if self._log.closed:
            return ""
        self._log.seek(0, os.SEEK_SET)
        lines = self._log.read().strip().splitlines()
        return f" (its last words: {lines[-1][:300]})" if lines else ""

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        target: Any = self._url
        if self._command:
            program, *arguments = self._command
            parameters = StdioServerParameters(command=program, args=arguments, env=self._environment)
            target = stdio_client(parameters, errlog=self._log)
        try:
            async with Client(target) as self.client:
                await self._list_tools()
                ready.set_result(None)
                await self._leave.wait()
        except Exception as error:  # noqa: BLE001  whatever a transport raises, alone or in groups
            if not ready.done():
                ready.set_exception(ConnectionError(f"{root_cause(error)}{self.last_words()}"))
        finally:
            if not ready.done():
                ready.cancel()
            with contextlib.suppress(OSError):
                self._log.close()

    async def _list_tools(self) -> None:
        cursor: str | None = None
        while True:
            page = await self.client.list_tools(cursor=cursor)
            self.tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return


class McpTool:
    """One tool of a server."""

    text_argument: str | None = None

    def __init__(self, server: McpServer, info: McpToolInfo):
        self.name = info.name
        self.description = info.description or info.title or info.name
        # An argument that a server does not name is refused here with the names that it has, not ignored there.
        self.parameters: dict[str, Any] = {"type": "object", "additionalProperties": False, **info.input_schema}
        self._server = server

    async def call(self, arguments: dict[str, Any], session: Session) -> ToolResult:
        return await self._server.call(self.name, arguments)

    async def close(self) -> None:
        """Its server is shared: McpServer.close ends it."""


def text_of(answer: CallToolResult) -> str:
    """The texts of an answer; what is no text is named. Without content, its structured form as JSON."""
    parts = [getattr(part, "text", f"[{part.type}]") for part in answer.content]
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def root_cause(error: BaseException) -> str:
    """The first plain exception inside groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
