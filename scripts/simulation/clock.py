"""Clock of a simulated cluster: the controller's work is measured, waits are skipped.

    now = processor time of the main thread - processor time of the fake workers + skipped waits

An idle event loop jumps to its next timer. Simulating an hour of a cluster therefore takes only the controller's
processor time, and other programs on the machine do not influence the result.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alphaapollo.observability.timing import Timer


class Clock:
    """Seconds since its creation. Only for the main thread."""

    def __init__(self) -> None:
        self._start = time.thread_time()
        self._start_of_process = time.process_time()
        self._elsewhere = 0.0
        self.skipped = 0.0

    def __call__(self) -> float:
        return self.work() + self.skipped

    def work(self) -> float:
        """Processor seconds of the controller's main thread."""
        return time.thread_time() - self._start - self._elsewhere

    def charge(self, seconds: float) -> None:
        """Add work of the main thread that the simulation does not do."""
        self._elsewhere -= seconds

    def work_of_threads(self) -> float:
        """Processor seconds of the other threads: the rollout log, torch."""
        return time.process_time() - self._start_of_process - (time.thread_time() - self._start)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Exclude the work of a fake worker in this process, which a real one does on its own machine."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self._elsewhere += time.thread_time() - begin


class Loop(asyncio.SelectorEventLoop):
    """Event loop on the simulated clock. `stretches`: seconds for which one callback blocked the loop."""

    def __init__(self, clock: Clock):
        super().__init__(_Selector(clock))
        self._now = clock

    def time(self) -> float:
        return self._now()

    @property
    def stretches(self) -> list[float]:
        selector: Any = self._selector  # type: ignore[attr-defined]
        return list(selector.stretches)


class _Selector(selectors.DefaultSelector):
    """Selector that skips waits for timers, but waits for threads."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock
        self.stretches: list[float] = []
        self._last = clock.work()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.stretches.append(self.clock.work() - self._last)
        events = super().select(0 if timeout is None or timeout > 0 else timeout)
        if not events and timeout is None:
            events = super().select(None)
        elif not events and timeout:
            self.clock.skipped += timeout
        self._last = self.clock.work()
        return events


class PhaseTimer(Timer):
    """Phase timer on the simulated clock that also measures the controller's work in each phase."""

    def __init__(self, clock: Clock):
        super().__init__(clock)
        self.work: dict[str, float] = defaultdict(float)
        self._clock_of_work, self._begin = clock.work, clock.work()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = self._clock_of_work()
        try:
            with super().__call__(phase):
                yield
        finally:
            self.work[phase] += self._clock_of_work() - begin

    @property
    def all_work(self) -> float:
        """Work since its creation, inside and outside of phases."""
        return self._clock_of_work() - self._begin
