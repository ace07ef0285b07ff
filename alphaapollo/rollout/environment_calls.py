"""Call environment methods, which are user code, within a time limit. Async methods run on this event loop, sync
methods in threads. Exceptions become EnvironmentFailure with a reason.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

from alphaapollo.environments.base import Environment, EnvironmentFailure, wrap_environment_errors
from alphaapollo.processes.time_limit import TimeLimit, exclude_from_time_limit
from alphaapollo.utils.heartbeat import HEARTBEAT

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0  # timeout of close()
MAX_THREADS = 64  # sync calls at a time


class EnvironmentCaller:
    """Calls environment methods on one event loop. At most `max_threads` sync methods run at a time."""

    def __init__(self, max_threads: int = MAX_THREADS):
        self._slots = asyncio.Semaphore(max_threads)

    async def call(self, time_limit: TimeLimit, environment: Environment, method_name: str, *arguments: object) -> Any:
        """Call a method of an environment. Raises EnvironmentFailure if it fails, TimeoutError after the time limit."""
        async with time_limit.count_time():
            with (
                HEARTBEAT.record_call(f"environment.{method_name}", timeout=time_limit.seconds_left),
                wrap_environment_errors(f"{type(environment).__qualname__}.{method_name}"),
            ):
                method = getattr(environment, method_name)
                try:
                    if inspect.iscoroutinefunction(method):
                        return await method(*arguments)
                    result = await self._run_in_thread(method, *arguments)
                    return await result if inspect.isawaitable(result) else result
                except SystemExit as error:  # an environment must not end the run
                    raise RuntimeError(f"the environment called exit ({error}). Raise an exception instead.") from error

    async def close(self, environment: Environment) -> None:
        """Close an environment. Failures are logged; they do not change the episode's result."""
        try:
            await self.call(TimeLimit(CLOSE_SECONDS), environment, "close")
        except (EnvironmentFailure, TimeoutError) as error:
            logger.warning("an environment's close() failed: %r", error)

    async def _run_in_thread(self, method: Callable[..., object], *arguments: object) -> Any:
        """Run a method in a new daemon thread and return its result. A cancelled call abandons the thread.

        In a thread pool, each hanging environment would block one thread and keep the process from exiting.
        """
        outcome: Future[tuple[Any, BaseException | None]] = Future()
        outcome.set_running_or_notify_cancel()

        def run_method() -> None:
            try:
                outcome.set_result((method(*arguments), None))
            except BaseException as error:  # noqa: BLE001  the caller raises it
                outcome.set_result((None, error))

        with exclude_from_time_limit():
            await self._slots.acquire()
        try:
            Thread(target=run_method, daemon=True).start()
            result, error = await asyncio.wrap_future(outcome)
        finally:
            self._slots.release()
        if error is not None:
            raise error
        return result
