"""What a run may take: tokens, calls, seconds, money, and a file that says stop.

A call is let in with the most that it may take (its promise), and settled with what it took; so limits hold to the
token, whatever is in flight. A share of each limit is kept for the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from alphaapollo.config.schema import Limits
from alphaapollo.evolving.pool import Spent

STOP = "STOP"  # the file's name, in the run's folder


class Halt(Exception):
    """No further call; says why. What is whole is kept, and the run chooses and writes its results."""


class Budget:
    """Belongs to one event loop.

    Args:
        limits: of all the run's processes together.
        spent: what earlier processes took, and `seconds` they were at work.
        stop_file: once it is there, nobody is let in.
    """

    def __init__(
        self,
        limits: Limits,
        spent: Spent,
        seconds: float,
        stop_file: Path,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._limits, self._stop_file, self._clock = limits, stop_file, clock
        self._spent, self._promised = spent, Spent()
        self._began = clock() - seconds
        self._changed = asyncio.Condition()
        self._share = 1.0 - limits.reserve

    @property
    def spent(self) -> Spent:
        return self._spent

    @property
    def seconds(self) -> float:
        """That the run has been at work."""
        return self._clock() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Until calls end that are in flight; None: there is no such limit."""
        return None if self._limits.seconds is None else self._limits.seconds * self._share - self.seconds

    def open_reserve(self) -> None:
        """The end has come: what was kept for it may be taken. The file that said stop has done its work."""
        self._share = 1.0
        self._stop_file.unlink(missing_ok=True)

    async def admit(self, promise: Spent) -> None:
        """Wait until there is room for so much. Halt: there is none, and nothing in flight could give any back."""
        async with self._changed:
            while True:
                if self._stop_file.exists():
                    raise Halt(f"{self._stop_file} is there")
                if (left := self.seconds_left) is not None and left <= 0:
                    raise Halt(f"budget.seconds={self._limits.seconds:g} is spent{self._kept()}")
                passed = self._passed(self._spent + self._promised + promise)
                if not passed:
                    self._promised += promise
                    return
                if not self._promised.calls:
                    raise Halt(f"budget.{passed} is spent{self._kept()}")
                await self._changed.wait()

    async def settle(self, promise: Spent, took: Spent) -> None:
        """The call has ended."""
        async with self._changed:
            self._promised -= promise
            self._spent += took
            self._changed.notify_all()

    def _passed(self, wanted: Spent) -> str:
        """The first limit that so much is over; empty: none."""
        for name in ("calls", "tokens", "money"):
            limit = getattr(self._limits, name)
            if limit is not None and getattr(wanted, name) > limit * self._share:
                return f"{name}={limit:g}"
        return ""

    def _kept(self) -> str:
        return f", but for the {self._limits.reserve:.0%} that are kept for the end" if self._share < 1 else ""
