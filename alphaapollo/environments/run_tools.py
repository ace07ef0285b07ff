"""The tools of a run, made once a rollout worker: those of env.tools, of env.mcp_servers, and what an environment
enables."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alphaapollo.config.schema import Env, InformalMath
from alphaapollo.config.schema import McpServer as McpSettings
from alphaapollo.environments.base import get_registered
from alphaapollo.environments.read_tags import THINK
from alphaapollo.environments.tag_actions import ANSWER
from alphaapollo.tools import python_code as python_code
from alphaapollo.tools import retrieval as retrieval
from alphaapollo.tools.base import Tool, make_tools
from alphaapollo.tools.base import tools as tools_by_name
from alphaapollo.tools.toolbox import Closable, ToolBox, ToolLimits
from alphaapollo.utils.registry import nearest

if TYPE_CHECKING:
    from alphaapollo.tools.mcp_client import McpServer


async def open_toolbox(config: Env) -> ToolBox | None:
    """The tools, the servers of env.mcp_servers being connected (side by side). None where there are no tools.

    ValueError: as make_toolbox, or a server that cannot be reached, or that lacks a tool.
    """
    if not config.mcp_servers:
        return make_toolbox(config)
    servers = {name: _server(name, settings) for name, settings in config.mcp_servers.items()}
    try:
        offered = await asyncio.gather(
            *(_start(servers[name], settings) for name, settings in config.mcp_servers.items())
        )
        return make_toolbox(config, [tool for tools in offered for tool in tools], list(servers.values()))
    except BaseException:
        await asyncio.gather(*(server.close() for server in servers.values()))
        raise


def make_toolbox(config: Env, more: Sequence[Tool] = (), owns: Sequence[Closable] = ()) -> ToolBox | None:
    """The tools by name and `more` of them; None where there are none. The box closes what it `owns`.

    ValueError: an unknown tool, settings of a tool that is not there, a setting that a tool does not have, an index
    that is missing, a name that is taken, Python that may take longer than a call.
    """
    names_of = get_registered(config.env_name).tools
    names = names_of(config) if names_of else []
    limits = config.tool_limits
    settings = _settings(config, names)
    tools = [*make_tools(names, settings), *more]
    _check_time(config, settings)
    if taken := [tool.name for tool in tools if config.action_format == "tags" and tool.name in (THINK, ANSWER)]:
        raise ValueError(
            f"the tool {taken[0]}: <{taken[0]}> means something else to env.action_format=tags. Rename it, leave it "
            "out (env.mcp_servers.NAME.tools), or set env.action_format=chat_template."
        )
    return (
        ToolBox(tools, ToolLimits(limits.timeout, limits.max_concurrent, limits.max_output), owns=owns)
        if tools
        else None
    )


def _settings(config: Env, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Those of env.tool_settings, and informal_math's time for Python."""
    given, named = config.tool_settings, config.informal_math.python_code_timeout
    for name in given:
        if name not in names:
            near = nearest(name, tools_by_name.names(), count=1)
            hint = f" Did you mean {near[0]!r}?" if near and near[0] != name else ""
            raise ValueError(
                f"env.tool_settings.{name}: the environment {config.env_name} is given no such tool.{hint} It is "
                f"given: {', '.join(names) or 'none'}. Known: {', '.join(tools_by_name.names())}. "
                "Name it in env.tools, or leave its settings out."
            )
    if "python_code" not in names:
        return given
    own = given.get("python_code", {})
    if own.get("timeout", named) != named != InformalMath().python_code_timeout:
        raise ValueError(
            f"env.tool_settings.python_code.timeout={own['timeout']} and "
            f"env.informal_math.python_code_timeout={named:g} are the same setting: leave one out."
        )
    return {**given, "python_code": {"timeout": named, **own}}


def _check_time(config: Env, settings: dict[str, dict[str, Any]]) -> None:
    """`settings`: such that tools could be made of them."""
    limit, seconds = config.tool_limits.timeout, float(settings.get("python_code", {}).get("timeout", 0))
    if seconds > limit:
        in_settings = "timeout" in config.tool_settings.get("python_code", {})
        key = "tool_settings.python_code.timeout" if in_settings else "informal_math.python_code_timeout"
        raise ValueError(
            f"env.{key}={seconds:g}: env.tool_limits.timeout={limit:g} would end the code before. Raise the limit, or "
            "lower the code's time."
        )


def _server(name: str, settings: McpSettings) -> McpServer:
    from alphaapollo.tools.mcp_client import McpServer

    if missing := [variable for variable in settings.environment if variable not in os.environ]:
        raise ValueError(f"env.mcp_servers.{name}.environment: {', '.join(missing)} is not set here. Set or remove it.")
    handed_on = {variable: os.environ[variable] for variable in settings.environment}
    return McpServer(name, settings.command, settings.url, handed_on)


async def _start(server: McpServer, settings: McpSettings) -> list[Tool]:
    tools = {tool.name: tool for tool in await server.start()}
    if unknown := [name for name in settings.tools if name not in tools]:
        near = nearest(unknown[0], tools, count=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"env.mcp_servers.{server.name}.tools: the server has no tool {unknown[0]!r}.{hint} It has: "
            f"{', '.join(tools)}."
        )
    return [tools[name] for name in settings.tools or tools]
