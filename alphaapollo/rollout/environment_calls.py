"""Call environment methods, which are user code: async methods on this event loop, sync methods in a thread, both
within a time limit. Every exception becomes an EnvironmentFailure with a reason."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from alphaapollo.environments.base import Environment, EnvironmentFailure, wrap_environment_errors
from alphaapollo.observability.spans import SPANS
from alphaapollo.rollout.sync_method_threads import SyncMethodThreads
from alphaapollo.utils.time_limit import TimeLimit

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0


async def call_environment(
    sync_threads: SyncMethodThreads, time_limit: TimeLimit, environment: Environment, name: str, *arguments: Any
) -> Any:
    """Call a method. Raises EnvironmentFailure, or TimeoutError when the time limit is exceeded."""
    async with time_limit.running():
        with SPANS(f"environment.{name}", within=time_limit.left):
            return await _call(sync_threads, environment, name, *arguments)


async def close_environment(sync_threads: SyncMethodThreads, environment: Environment) -> None:
    """Close an environment. Failures are logged; they do not change the episode's result."""
    try:
        await call_environment(sync_threads, TimeLimit(CLOSE_SECONDS), environment, "close")
    except (EnvironmentFailure, TimeoutError) as error:
        logger.warning("an environment did not close: %r", error)


async def _call(sync_threads: SyncMethodThreads, environment: Environment, name: str, *arguments: Any) -> Any:
    with wrap_environment_errors(f"{type(environment).__qualname__}.{name}"):
        method = getattr(environment, name)
        try:
            if inspect.iscoroutinefunction(method):
                return await method(*arguments)
            result = await sync_threads.run(method, *arguments)
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:  # must not end the run
            raise RuntimeError(f"it called exit ({error})") from error
