"""Environments without an observation: `single_turn` scores the first answer; `agent` is a program of the user."""

from __future__ import annotations

from typing import Never

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import Observation, Services, StepResult, register_environment
from alphaapollo.types import Prompt


@register_environment("single_turn", graded=True, tools=None)
class SingleTurnEnvironment:
    """Environment that shows the prompt unchanged and scores the first answer."""

    def __init__(self, services: Services):
        self._score = services.score
        self._prompt: Prompt | None = None

    async def reset(self, prompt: Prompt) -> Observation | str:
        self._prompt = prompt
        return prompt.content if isinstance(prompt.content, str) else Observation(prompt.content)

    async def step(self, action: str) -> StepResult:
        assert self._prompt is not None, "step before reset"
        return StepResult(done=True, score=await self._score(self._prompt, action))

    async def close(self) -> None: ...


def check_agent(config: Env) -> None:
    """Raise ValueError unless exactly one of env.agent.path and env.agent.command is set."""
    agent = config.agent
    if bool(agent.path) == bool(agent.command):
        given = f"env.agent.path={agent.path} and env.agent.command={agent.command}" if agent.path else "none of them"
        raise ValueError(f"env.env_name=agent: set env.agent.path or env.agent.command; {given} is set.")


@register_environment("agent", graded=lambda config: config.agent.grade, check=check_agent, tools=None)
def create_agent_environment(services: Services) -> Never:
    """Raise ValueError: agents call a vLLM engine over HTTP (rollout/agents/), and receive no actions."""
    raise ValueError("env.env_name=agent needs vLLM, which the validation of main_sft does not use. Set another one.")


class UnscoredAnswer(SingleTurnEnvironment):
    """Environment that ends the episode after one answer, without a score."""

    async def step(self, action: str) -> StepResult:
        return StepResult(done=True)
