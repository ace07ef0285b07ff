"""Wrap a run's environment for chat: every turn is reported to an observer, and nothing is graded."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from alphaapollo.config.schema import Env
from alphaapollo.environments.base import (
    Environment,
    EnvironmentSpec,
    Observation,
    Services,
    StepResult,
    get_environment_spec,
    register_environment,
)
from alphaapollo.types import Prompt, Score


class EpisodeObserver(Protocol):
    """Receives the turns of an episode."""

    def model_turn(self, text: str) -> None:
        """Report a turn of the model."""

    def environment_reply(self, result: StepResult) -> None:
        """Report the environment's result: tool output, or the end of the episode."""


class ObservedEnvironment:
    """Wrapper of one environment."""

    def __init__(self, inner: Environment, observer: EpisodeObserver):
        self._inner, self._observer = inner, observer
        if hasattr(inner, "recall"):  # used by memory context
            self.recall = inner.recall

    async def reset(self, prompt: Prompt) -> Observation | str:
        first: Observation | str = await _call(self._inner.reset, prompt)
        return first

    async def step(self, action: str) -> StepResult:
        self._observer.model_turn(action)
        result: StepResult = await _call(self._inner.step, action)
        self._observer.environment_reply(result)
        return result

    async def close(self) -> None:
        await _call(self._inner.close)


def observe(env: Env, observer: EpisodeObserver) -> Env:
    """Register the observed environment in this process and return a config section that selects it."""
    known: EnvironmentSpec = get_environment_spec(env.env_name)

    async def ungraded(prompt: Prompt, text: str) -> Score:
        return Score(0.0)

    def factory(services: Services) -> ObservedEnvironment:
        return ObservedEnvironment(known.factory(replace(services, score=ungraded, config=env)), observer)

    name = f"observed {env.env_name}"
    register_environment(name, tools=known.tools)(factory)
    return env.model_copy(update={"env_name": name})


async def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call async methods directly and sync ones in a thread, like an episode."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    result = await asyncio.to_thread(method, *arguments)
    return await result if inspect.isawaitable(result) else result
