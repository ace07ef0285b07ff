"""The tools of a run, made once a rollout worker from env.tools and what an environment enables."""

from __future__ import annotations

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import get_registered
from alphaapollo.tools import python_code as python_code
from alphaapollo.tools import retrieval as retrieval
from alphaapollo.tools.base import make_tools
from alphaapollo.tools.toolbox import ToolBox, ToolLimits


def make_toolbox(config: Env) -> ToolBox | None:
    """None where the environment has no tools.

    ValueError: an unknown tool, a setting that a tool does not have, an index that is not there.
    """
    names = get_registered(config.env_name).tools(config)
    if not names:
        return None
    limits = config.tool_limits
    settings = {"python_code": {"timeout": config.informal_math.python_code_timeout}} | config.tool_settings
    tools = make_tools(names, {name: own for name, own in settings.items() if name in names})
    return ToolBox(tools, ToolLimits(limits.timeout, limits.max_concurrent, limits.max_output))
