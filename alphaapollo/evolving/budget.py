"""Limit the model calls of a run by its budget (`budget.*`) and by the STOP file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

from alphaapollo.config.schema import EvolvingBudget, ServedModel
from alphaapollo.evolving.pool import Usage

STOP = "STOP"  # name of the stop file in the run folder
T = TypeVar("T")


class EvolutionStopped(Exception):
    """Exception that ends the rounds of a run early; its text is the reason. Answers are still chosen and written."""


def compute_call_price(model: ServedModel, tokens_read: int, tokens_written: int) -> float:
    """Return the price of one call, from models.NAME.price_in and price_out (per million tokens)."""
    return (tokens_read * model.price_in + tokens_written * model.price_out) / 1e6


class Budget:
    """Admission control for model calls; belongs to one event loop.

    A call reserves its maximum usage before it starts, so calls in flight never exceed a limit.

    Args:
        limits: limits for all processes of the run together.
        used: usage of earlier processes.
        seconds: run time of earlier processes.
        stop_file: file whose existence ends the run.
    """

    def __init__(self, limits: EvolvingBudget, used: Usage, seconds: float, stop_file: Path):
        self._limits, self._stop_file = limits, stop_file
        self.used, self._in_flight = used, Usage()
        self._began = time.monotonic() - seconds
        self._changed = asyncio.Condition()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far, including earlier starts."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Remaining time in seconds; None without a time limit."""
        return None if self._limits.seconds is None else self._limits.seconds - self.seconds

    async def admit_call(self, max_usage: Usage) -> None:
        """Wait until a call with this maximum usage fits into the budget. Raises EvolutionStopped if the stop file
        exists, or if the call does not fit and no call is in flight."""
        async with self._changed:
            while True:
                if self._stop_file.exists():
                    raise EvolutionStopped(f"the stop file {self._stop_file} exists")
                if (left := self.seconds_left) is not None and left <= 0:
                    raise EvolutionStopped(self._describe_spent_limit("seconds"))
                requested = self.used + self._in_flight + max_usage
                exceeded = [name for name in ("calls", "tokens", "money") if self._is_limit_exceeded(name, requested)]
                if not exceeded:
                    self._in_flight += max_usage
                    return
                if not self._in_flight.calls:
                    raise EvolutionStopped(self._describe_spent_limit(exceeded[0]))
                await self._changed.wait()

    async def settle_call(self, max_usage: Usage, actual_usage: Usage) -> None:
        """Replace the reserved maximum usage of a finished call by its actual usage."""
        async with self._changed:
            self._in_flight -= max_usage
            self.used += actual_usage
            self._changed.notify_all()

    def _is_limit_exceeded(self, limit_name: str, requested: Usage) -> bool:
        limit = getattr(self._limits, limit_name)
        return limit is not None and getattr(requested, limit_name) > limit

    def _describe_spent_limit(self, limit_name: str) -> str:
        return f"budget.{limit_name}={getattr(self._limits, limit_name):g} is spent"


async def gather_all(jobs: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Like asyncio.gather, but wait for all jobs before raising, so that calls in flight are still logged.

    EvolutionStopped is raised only if no job raised another error.
    """
    results = await asyncio.gather(*jobs, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise next((error for error in errors if not isinstance(error, EvolutionStopped)), errors[0])
    return [result for result in results if not isinstance(result, BaseException)]
