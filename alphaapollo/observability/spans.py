"""What a process does when: what it is in the middle of (pulse.py), and, noted while somebody asks for it
(trainer.profile_steps), what it was.

    with SPANS.at("rollout 0", "train.12.0.3"):     # for this task and those that it starts
        with SPANS("generate", tokens=83):          # costs next to nothing while nobody asks
            ...

Each process has its own list; the controller fetches them (trainer/profile.py) and writes one trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from alphaapollo.utils.heartbeat import PULSE


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. Spans of one lane follow each other or lie within each other."""

    track: str  # who: controller, policy 0, rollout 3
    lane: str  # what of it goes on at the same time: a thread, an episode
    name: str
    start: float  # unix seconds
    seconds: float
    args: dict[str, Any] = field(default_factory=dict)


_place: ContextVar[tuple[str, str]] = ContextVar("place", default=("controller", "loop"))


class Spans:
    """The spans of a process. Its clock is that of the wall when it began to note, and even from there."""

    def __init__(self) -> None:
        self._noted: list[Span] | None = None
        self._zero = 0.0  # of the even clock, in unix seconds

    @property
    def on(self) -> bool:
        return self._noted is not None

    def start(self) -> None:
        """Note from now on; a second call changes nothing, as where several workers share a process."""
        if self._noted is None:
            self._noted, self._zero = [], time.time() - time.perf_counter()

    def take(self) -> list[Span]:
        """What was noted, and no more from now on; nothing at a second call."""
        noted, self._noted = self._noted, None
        return noted or []

    @contextmanager
    def at(self, track: str | None = None, lane: str | None = None) -> Iterator[None]:
        """Where the spans within belong, also those of what goes on when somebody asks; what is not given stays."""
        before = _place.get()
        token = _place.set((track or before[0], lane or before[1]))
        try:
            yield
        finally:
            _place.reset(token)

    @contextmanager
    def __call__(self, name: str, within: float | None = None, **args: Any) -> Iterator[None]:
        """The block is a span, also when it raises; `args` are shown with it. within: seconds after which somebody ends
        it."""
        noted, begin, (track, lane) = self._noted, time.perf_counter(), _place.get()
        try:
            with PULSE.doing(name, limit=within):
                yield
        finally:
            if noted is not None:
                noted.append(Span(track, lane, name, self._zero + begin, time.perf_counter() - begin, args))


SPANS = Spans()
"""Those of this process."""


def start_spans() -> None:
    """For calls from another process: a function that travels there by its name, where SPANS would go as a copy."""
    SPANS.start()


def take_spans() -> list[Span]:
    """Likewise."""
    return SPANS.take()
