"""Connect to the servers of env.mcp_servers, and open their tools."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from alphaapollo.config.schema import McpServer
from alphaapollo.plugins.mcp.client import McpClient
from alphaapollo.tools.base import Tool
from alphaapollo.utils.registry import suggest_similar


async def open_servers(servers: Mapping[str, McpServer]) -> list[Tool]:
    """Connect to the servers and return their tools. Raises ValueError if a server is unreachable or lacks a tool."""
    clients = {name: _make_client(name, settings) for name, settings in servers.items()}
    try:
        tools = await asyncio.gather(*(_start(client, servers[name]) for name, client in clients.items()))
    except BaseException:
        await asyncio.gather(*(client.close() for client in clients.values()))
        raise
    return [tool for tools_of_one in tools for tool in tools_of_one]


def _make_client(name: str, settings: McpServer) -> McpClient:
    if missing := [variable for variable in settings.environment if variable not in os.environ]:
        raise ValueError(
            f"env.mcp_servers.{name}.environment: the environment variable {missing[0]} is not set. Set it, or "
            "remove its name from the list."
        )
    environment = {variable: os.environ[variable] for variable in settings.environment}
    return McpClient(name, settings.command, settings.url, environment)


async def _start(client: McpClient, settings: McpServer) -> list[Tool]:
    """Connect to a server and return its tools, or only those in `settings.tools` if set."""
    tools = {tool.name: tool for tool in await client.start()}
    if not tools:
        await client.close()  # otherwise its tools close it
    if unknown := [name for name in settings.tools if name not in tools]:
        raise ValueError(
            f"env.mcp_servers.{client.name}.tools: the server has no tool {unknown[0]!r}."
            f"{suggest_similar(unknown[0], tools)} Its tools: {', '.join(tools)}."
        )
    return [tools[name] for name in settings.tools or tools]
