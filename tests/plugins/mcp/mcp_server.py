"""A small MCP server for the tests: over stdio, or with a port as argument over HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from mcp import MCPError
from mcp.server.mcpserver import Image, MCPServer
from mcp.types import ListToolsResult, PaginatedRequestParams


class PagedServer(MCPServer):
    """Lists three tools per page."""

    async def _handle_list_tools(self, ctx: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        tools, start = await self.list_tools(), int((params and params.cursor) or 0)
        end = start + 3
        return ListToolsResult(tools=tools[start:end], next_cursor=str(end) if end < len(tools) else None)


server = PagedServer("small", log_level="CRITICAL")
calls = 0


@server.tool()
def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def draw() -> list[str | Image]:
    """Draw."""
    return ["a square", Image(data=b"\x89PNG square", format="png")]


@server.tool()
def count() -> str:
    """How often it was called since the server started."""
    global calls
    calls += 1
    return str(calls)


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no good")


@server.tool()
def reject() -> str:
    """Refuse in the protocol's own way."""
    raise MCPError(code=-32602, message="not these arguments")


@server.tool()
def die() -> str:
    """Die in the middle of a call."""
    print("cannot go on", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def die_once(mark: str) -> str:
    """Die in the middle of the first call."""
    if os.path.exists(mark):
        return "alive"
    with open(mark, "w", encoding="utf-8"):
        os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
