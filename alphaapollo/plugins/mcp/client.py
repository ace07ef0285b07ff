"""Tools of MCP servers, over stdio or HTTP, with the package `mcp` (extra `mcp`).

    client = McpClient("files", command=["npx", "-y", "some-server", "/data"])
    tools = await client.start()                 # Tool objects for a ToolBox
    ...
    await client.close()

All episodes of a process share one connection. If it breaks, the current calls raise ToolFailedError and the next call
reconnects; a ToolBox retries such calls once. A stdio server is then restarted and loses its state.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alphaapollo.tools.base import Session, Tool, ToolFailedError, ToolResult, ToolStatus
from alphaapollo.utils.json_types import JsonObject

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as McpToolInfo

CONNECT_TIMEOUT = 60.0  # seconds to start a server and list its tools
CLOSE_TIMEOUT = 10.0  # seconds to disconnect
INVALID_PARAMETERS = -32602  # JSON-RPC: the server rejects the arguments


class McpClient:
    """Client of one MCP server, which it starts as a program (`command`, over stdio) or reaches at a streamable HTTP
    endpoint (`url`). Bound to one event loop. `environment`: additional environment variables of the program, which
    inherits only a few (e.g. PATH). Raises ValueError unless exactly one of `command` and `url` is set."""

    def __init__(
        self, name: str, command: Sequence[str] = (), url: str = "", environment: Mapping[str, str] | None = None
    ):
        if bool(command) == bool(url):
            raise ValueError(
                f"MCP server {name} needs exactly one of command and url, but {'both are' if url else 'none is'} set."
            )
        if importlib.util.find_spec("mcp") is None:
            raise ValueError(f"MCP server {name} needs the package mcp. Install it: pip install -e '.[mcp]'")
        self.name = name
        self._command, self._url, self._environment = list(command), url, dict(environment or {})
        self._connect_lock = asyncio.Lock()
        # The connection has its own task, because the task that enters the package's Client must also exit it.
        self._connection: asyncio.Task[None] | None = None
        self._client: Client
        self._tools: list[McpToolInfo]
        self._closing: asyncio.Event
        self._log: Any  # stderr of the server

    async def start(self) -> list[McpTool]:
        """Connect to the server and return its tools. Raises ValueError if the server cannot be reached."""
        try:
            await self._connect()
        except ToolFailedError as error:
            raise ValueError(f"{error}. Check the {'command' if self._command else 'url'} of this server.") from error
        return [McpTool(self, info) for info in self._tools]

    async def call(self, tool: str, arguments: JsonObject) -> ToolResult:
        """Call a tool of the server. Raises ToolFailedError if the server is unreachable, dies or sends a bad reply."""
        from mcp import MCPError

        await self._connect()
        connection = self._connection
        try:
            answer = await self._client.call_tool(tool, arguments)
        except (MCPError, OSError, ValueError) as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMETERS:
                return ToolResult(error.message, ToolStatus.ERROR)
            reason = f"MCP server {self.name}: {error}{self._read_last_log_line()}"
            if connection is self._connection:
                await self.close()
            raise ToolFailedError(reason) from error
        images = [base64.b64decode(part.data) for part in answer.content if part.type == "image"]
        status = ToolStatus.ERROR if answer.is_error else ToolStatus.OK
        return ToolResult(format_answer(answer), status, images=images)

    async def close(self) -> None:
        """Disconnect from the server, which stops a stdio server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._closing.set()
            await asyncio.wait([connection], timeout=CLOSE_TIMEOUT)
            connection.cancel()

    async def _connect(self) -> None:
        """Connect to the server and list its tools, unless there is a connection. Raises ToolFailedError."""
        async with self._connect_lock:
            if self._connection is not None:
                return
            ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            connection = asyncio.create_task(self._run_connection(ready))
            try:
                await asyncio.wait([ready], timeout=CONNECT_TIMEOUT)
            finally:
                if not ready.done():  # timeout, or a cancelled caller, which will not close the connection
                    connection.cancel()
            if reason := ready.result() if ready.done() else f"no connection within {CONNECT_TIMEOUT:g} s":
                raise ToolFailedError(f"MCP server {self.name}: {reason}")
            self._connection = connection

    def _read_last_log_line(self) -> str:
        """Return the last line of the server's stderr in parentheses, to append to a message; empty if none."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f" (last line of its stderr: {lines[-1][:300]})" if lines else ""

    async def _run_connection(self, ready: asyncio.Future[str]) -> None:
        """Connect, set `ready` to an empty string or the reason of a failure, and wait until `close` is called."""
        from mcp import Client, StdioServerParameters, stdio_client

        self._tools, self._closing = [], asyncio.Event()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed below
        target: Any = self._url
        if self._command:
            program, *arguments = self._command
            parameters = StdioServerParameters(command=program, args=arguments, env=self._environment)
            target = stdio_client(parameters, errlog=self._log)
        with self._log:
            try:
                async with Client(target) as self._client:
                    page = await self._client.list_tools()
                    self._tools += page.tools
                    while page.next_cursor is not None:
                        page = await self._client.list_tools(cursor=page.next_cursor)
                        self._tools += page.tools
                    ready.set_result("")
                    await self._closing.wait()
            except Exception as error:  # noqa: BLE001  transports raise many types, alone or in groups
                if not ready.done():
                    ready.set_result(f"{find_root_cause(error)}{self._read_last_log_line()}")


class McpTool(Tool):
    """Tool of an MCP server, called through the client of that server."""

    def __init__(self, client: McpClient, tool_info: McpToolInfo):
        self.name = tool_info.name
        self.description = tool_info.description or tool_info.title or tool_info.name
        # Reject unknown arguments with a list of the known ones; servers would ignore them.
        self.parameters: JsonObject = {"type": "object", "additionalProperties": False, **tool_info.input_schema}
        self._client = client

    async def call(self, arguments: JsonObject, session: Session) -> ToolResult:
        return await self._client.call(self.name, arguments)

    async def close(self) -> None:
        """Disconnect from the server, for all of its tools."""
        await self._client.close()


def format_answer(answer: CallToolResult) -> str:
    """Return an MCP tool's answer as text, with placeholders such as `[image]` for parts that are not text."""
    parts = [getattr(getattr(part, "resource", part), "text", f"[{part.type}]") for part in answer.content]
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def find_root_cause(error: BaseException) -> str:
    """Return the type and message of an exception. Of nested exception groups, take the first exception inside."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
