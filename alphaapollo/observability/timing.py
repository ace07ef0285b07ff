"""Time the phases of an iteration, such as generate and update."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alphaapollo.utils.heartbeat import HEARTBEAT


class Timer:
    """Timer of the phases of an iteration, in seconds. Phases of the same name add up. Phases must not nest.

    >>> timer = Timer()
    >>> with timer("generate"):
    ...     pass
    >>> sorted(timer.metrics())
    ['timing/generate', 'timing/other', 'timing/step', 'timing_share/generate', 'timing_share/other']
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Context manager: add the block's time to the phase, even if the block raises."""
        begin = self._clock()
        try:
            with HEARTBEAT.record_call(phase):
                yield
        finally:
            self.seconds[phase] += self._clock() - begin

    @property
    def elapsed(self) -> float:
        """Return the seconds since construction."""
        return self._clock() - self._start

    def metrics(self) -> dict[str, float]:
        """Return timing/PHASE in seconds, timing/step (total), timing/other (outside phases) and timing_share/PHASE."""
        step = self.elapsed
        seconds = {**self.seconds, "other": step - sum(self.seconds.values())}
        metrics = {f"timing/{phase}": spent for phase, spent in seconds.items()} | {"timing/step": step}
        return metrics | {f"timing_share/{phase}": spent / step if step else 0.0 for phase, spent in seconds.items()}
