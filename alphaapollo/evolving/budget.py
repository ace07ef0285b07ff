"""Limits on the model calls of a run: calls, tokens, money and seconds, for all starts of the run together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from alphaapollo.config.schema import EvolvingBudget, ServedModel
from alphaapollo.evolving.pool import Pool, Usage

STOP = "STOP"  # name of the stop file in the run folder


class EvolutionStopped(Exception):
    """Exception that ends the rounds of a run early; its text is the reason. Answers are still chosen and written."""


class Budget:
    """Admission control for model calls; belongs to one event loop.

    A call reserves its maximum usage before it starts, so calls in flight never exceed a limit.

    Args:
        limits: limits for all processes of the run together.
        pool: log of the calls that have ended.
        stop_file: file whose existence ends the run.
    """

    def __init__(self, limits: EvolvingBudget, pool: Pool, stop_file: Path):
        self._limits, self._pool, self._stop_file = limits, pool, stop_file
        self._in_flight: list[Usage] = []  # maximum usage of each call
        self._began = time.monotonic() - pool.seconds
        self._changed = asyncio.Condition()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken so far, including earlier starts."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Remaining time in seconds; None without a time limit."""
        return None if self._limits.seconds is None else self._limits.seconds - self.seconds

    @asynccontextmanager
    async def reserve(self, max_usage: Usage) -> AsyncIterator[None]:
        """Wait until a call with this maximum usage fits into the budget, and reserve it during the block, which logs
        the call. Raises EvolutionStopped if the stop file exists, or if the call does not fit and no call is in
        flight."""
        async with self._changed:
            while spent := self._find_spent_limit(max_usage):
                if spent == "seconds" or not self._in_flight:
                    raise EvolutionStopped(f"budget.{spent}={getattr(self._limits, spent):g} is spent")
                await self._changed.wait()
            self._in_flight.append(max_usage)
        try:
            yield
        finally:
            async with self._changed:
                self._in_flight.remove(max_usage)
                self._changed.notify_all()

    def _find_spent_limit(self, max_usage: Usage) -> str | None:
        if self._stop_file.exists():
            raise EvolutionStopped(f"the stop file {self._stop_file} exists")
        usage = vars(sum([*self._in_flight, max_usage], self._pool.total_usage)) | {"seconds": self.seconds}
        limits = self._limits.model_dump(exclude_none=True)
        return next((name for name, limit in limits.items() if usage[name] > limit), None)


def compute_call_price(model: ServedModel, tokens_read: int, tokens_written: int) -> float:
    """Return the price of one call, from models.NAME.price_in and price_out (per million tokens)."""
    return (tokens_read * model.price_in + tokens_written * model.price_out) / 1e6
