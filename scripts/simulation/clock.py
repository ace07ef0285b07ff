"""The time of a simulated cluster: the controller's work counts as it is, waiting costs nothing.

    now = processor time of the main thread - what the fakes took of it + the waits that were skipped

An event loop with nothing to do but to wait for a timer jumps to that timer. So an hour of a cluster takes as long as
its controller works, and other programs on the machine do not count.
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
    """Seconds since it was made; asked from the main thread alone."""

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
        """Work of the main thread that is not done here, but would be."""
        self._elsewhere -= seconds

    def work_of_threads(self) -> float:
        """Processor seconds of its other threads: the rollout log, torch."""
        return time.process_time() - self._start_of_process - (time.thread_time() - self._start)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What a fake worker does in this process, and would do on a machine of its own."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self._elsewhere += time.thread_time() - begin


class Loop(asyncio.SelectorEventLoop):
    """An event loop on that clock. `stretches`: seconds that it worked without a look at what else is due."""

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
    """Skips what it would wait, unless a thread is waited for (no timer is set then)."""

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
    """The loop's timer on that clock, which also counts the controller's own work in each phase."""

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
        """Since it was made, outside any phase too."""
        return self._clock_of_work() - self._begin
