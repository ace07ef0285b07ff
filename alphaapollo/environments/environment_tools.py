"""Create the tools of a rollout worker from env.tools, from sources of tools such as MCP servers, and the
tools that the environment enables."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from alphaapollo.config.schema import Env, InformalMath
from alphaapollo.environments.actions import ANSWER
from alphaapollo.environments.base import find_tool_sources, get_environment_spec
from alphaapollo.tools import python_code as python_code
from alphaapollo.tools.base import Tool, make_tools
from alphaapollo.tools.toolbox import ToolBox
from alphaapollo.utils.json_types import JsonObject
from alphaapollo.utils.plugins import load_plugin
from alphaapollo.utils.registry import suggest_similar
from alphaapollo.utils.thoughts import TAGS


async def open_toolbox(config: Env) -> ToolBox | None:
    """Open the sources of tools that the configuration selects, e.g. MCP servers, and create the toolbox of all tools;
    None if there are no tools. Raises ValueError if a source cannot be opened, or if `make_toolbox` raises it."""
    opened = list[Tool]()
    try:
        for name, settings in find_tool_sources(config).items():
            opened += await load_plugin("tool_sources", name)(settings)
        return make_toolbox(config, opened)
    except BaseException:
        await asyncio.gather(*(tool.close() for tool in opened))
        raise


def make_toolbox(config: Env, opened_tools: Sequence[Tool] = ()) -> ToolBox | None:
    """Create the toolbox of an environment from its own tools, env.tools and `opened_tools`; None without tools."""
    spec = get_environment_spec(config.env_name)
    names = spec.tools(config) if spec.tools else []
    settings = _merge_tool_settings(config, names)
    own_tools = spec.own_tools() if spec.own_tools else ()
    tools = [*own_tools, *make_tools(names, settings), *opened_tools]
    limits = config.tool_limits
    if (seconds := float(settings.get("python_code", {}).get("timeout", 0))) > limits.timeout:
        raise ValueError(
            f"python_code timeout of {seconds:g} s must not exceed env.tool_limits.timeout={limits.timeout:g} s. Raise "
            "that limit, or lower env.informal_math.python_code_timeout or env.tool_settings.python_code.timeout."
        )
    if reserved := [tool.name for tool in tools if config.action_format == "tags" and tool.name in (*TAGS, ANSWER)]:
        raise ValueError(
            f"the tool name {reserved[0]} is reserved: with env.action_format=tags, <{reserved[0]}> marks the "
            "model's thoughts or answer. Rename the tool, exclude it (env.mcp_servers.NAME.tools), or set "
            "env.action_format=chat_template."
        )
    return ToolBox(tools, limits) if tools else None


def _merge_tool_settings(config: Env, names: Sequence[str]) -> dict[str, JsonObject]:
    """Return env.tool_settings of the tools `names`, with env.informal_math.python_code_timeout filled in."""
    settings, timeout = config.tool_settings, config.informal_math.python_code_timeout
    if unused := [name for name in settings if name not in names]:
        raise ValueError(
            f"env.tool_settings.{unused[0]}: the environment {config.env_name} does not use this tool."
            f"{suggest_similar(unused[0], names)} Its tools: {', '.join(names) or 'none'}. Add the tool to env.tools "
            "or remove its settings."
        )
    if "python_code" not in names:
        return settings
    python_settings = {"timeout": timeout, **settings.get("python_code", {})}
    if python_settings["timeout"] != timeout != InformalMath().python_code_timeout:
        raise ValueError(
            f"env.tool_settings.python_code.timeout={python_settings['timeout']} conflicts with "
            f"env.informal_math.python_code_timeout={timeout:g}: both set the timeout of python_code. Remove one."
        )
    return {**settings, "python_code": python_settings}
