"""Environment `agent`: the user's program calls the policy over HTTP (rollout/agents/)."""

from __future__ import annotations

from typing import Never

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Services, register_environment


def check_agent(config: Env) -> None:
    """Raise ValueError unless exactly one of env.agent.path and env.agent.command is set."""
    agent = config.agent
    if bool(agent.path) == bool(agent.command):
        given = f"env.agent.path={agent.path} and env.agent.command={agent.command}" if agent.path else "none of them"
        raise ValueError(f"env.env_name=agent: set env.agent.path or env.agent.command; {given} is set.")


@register_environment("agent", graded=lambda config: config.agent.grade, check=check_agent, tools=None)
def create_agent_environment(services: Services) -> Never:
    """Raise ValueError: agents call a vLLM engine, and are no environment that receives actions."""
    raise ValueError("env.env_name=agent needs vLLM, which the validation of main_sft does not use. Set another one.")
