"""Calls into environments, which are the user's code: async methods on this loop, sync ones in a thread, all within a
clock, and whatever they raise is a failure with a reason."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from alphaapollo.environments.base import Environment, EnvironmentFailure, blaming
from alphaapollo.observability.spans import SPANS
from alphaapollo.rollout.sync_calls import SyncCalls
from alphaapollo.utils.time_limit import Clock

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0


async def call_environment(
    sync_calls: SyncCalls, clock: Clock, environment: Environment, name: str, *arguments: Any
) -> Any:
    """What the method of that name returns. EnvironmentFailure; TimeoutError, once the clock has run out."""
    async with clock.running():
        with SPANS(f"environment.{name}", within=clock.left):
            return await _called(sync_calls, environment, name, *arguments)


async def close_environment(sync_calls: SyncCalls, environment: Environment) -> None:
    """The episode's result stands, whatever comes of closing."""
    try:
        await call_environment(sync_calls, Clock(CLOSE_SECONDS), environment, "close")
    except (EnvironmentFailure, TimeoutError) as error:
        logger.warning("an environment did not close: %r", error)


async def _called(sync_calls: SyncCalls, environment: Environment, name: str, *arguments: Any) -> Any:
    with blaming(f"{type(environment).__qualname__}.{name}"):
        method = getattr(environment, name)
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*arguments)
            result = await sync_calls.run(method, *arguments)
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:  # an environment does not end the run
            raise RuntimeError(f"it wants to exit ({error})") from error
