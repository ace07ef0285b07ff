"""Time of the verbs of a user's loop, and the speed of its sampling."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alphaapollo.observability.timing import make_timing_metrics

GENERATE = "generate"  # part of the verbs sample, rollout and evaluate in which the engines work


class VerbTimer:
    """Timer of the calls between two logged steps. The time in which calls of one name overlap counts once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._last = clock, clock()
        self._running, self._seconds = Counter[str](), defaultdict[str, float](float)
        self.tokens = 0  # number of tokens sampled since the last `take_metrics`

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context manager: add the block's time to the name, even if the block raises."""
        self._advance()
        self._running[name] += 1
        try:
            yield
        finally:
            self._advance()
            self._running[name] -= 1

    def _advance(self) -> None:
        """Add the time since the last change to all running calls, or to `other`."""
        now = self._clock()
        running = [name for name, count in self._running.items() if count]
        for name in ("step", *(running or ["other"])):
            self._seconds[name] += now - self._last
        self._last = now

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call: timing/VERB, timing/other (between verbs) and timing/step in seconds,
        timing_share/VERB and, if engines have worked, rollout/tokens_per_second."""
        self._advance()
        seconds, tokens = self._seconds, self.tokens
        self._seconds, self.tokens = defaultdict(float), 0
        step, generation = seconds.pop("step"), seconds.pop(GENERATE, 0.0)
        metrics = make_timing_metrics(seconds, step)
        return metrics | ({"rollout/tokens_per_second": tokens / generation} if generation else {})
