"""A run's own environment, for a person to talk through: every call is shown as it happens, and nobody is graded."""

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


class Viewer(Protocol):
    """Who is shown an episode."""

    def said(self, text: str) -> None:
        """By the model, in one turn."""

    def answered(self, result: StepResult) -> None:
        """By the environment: what a tool gave, or the end."""


class Watched:
    """Around one environment of the run."""

    def __init__(self, inner: Environment, viewer: Viewer):
        self._inner, self._viewer = inner, viewer
        if hasattr(inner, "recall"):  # which memory context looks for
            self.recall = inner.recall

    async def reset(self, prompt: Prompt) -> Observation | str:
        first: Observation | str = await _called(self._inner.reset, prompt)
        return first

    async def step(self, action: str) -> StepResult:
        self._viewer.said(action)
        result: StepResult = await _called(self._inner.step, action)
        self._viewer.answered(result)
        return result

    async def close(self) -> None:
        await _called(self._inner.close)


def watch(env: Env, viewer: Viewer) -> Env:
    """The section whose environment is that of `env`, watched; for this process."""
    known: EnvironmentSpec = get_environment_spec(env.env_name)

    async def ungraded(prompt: Prompt, text: str) -> Score:
        return Score(0.0)

    def factory(services: Services) -> Watched:
        return Watched(known.factory(replace(services, score=ungraded, config=env)), viewer)

    name = f"watched {env.env_name}"
    register_environment(name, tools=known.tools)(factory)
    return env.model_copy(update={"env_name": name})


async def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """Async methods here, sync ones in a thread, as an episode calls them."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    result = await asyncio.to_thread(method, *arguments)
    return await result if inspect.isawaitable(result) else result
