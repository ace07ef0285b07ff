"""Spans of a process: active calls for stall detection (utils/heartbeat.py), recorded during trainer.profile_steps.

    with SPANS.at("rollout 0", "train.12.0.3"):     # for this task and tasks started in it
        with SPANS("generate", tokens=83):          # almost free while not recording
            ...

Each process records its own spans; the controller collects them (trainer/profile.py) into one trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from alphaapollo.utils.heartbeat import HEARTBEAT


@dataclass(frozen=True, slots=True)
class Span:
    """A named time interval. Spans of one lane are sequential or nested."""

    track: str  # controller, policy 0, rollout 3
    lane: str  # concurrent part of the track: a thread, an episode
    name: str
    start: float  # unix seconds
    seconds: float
    args: dict[str, Any] = field(default_factory=dict)


_place: ContextVar[tuple[str, str]] = ContextVar("place", default=("controller", "loop"))


class Spans:
    """Spans of a process, timed by a monotonic clock that starts at wall-clock time."""

    def __init__(self) -> None:
        self._recorded: list[Span] | None = None
        self._zero = 0.0  # unix time of the monotonic clock's zero

    @property
    def on(self) -> bool:
        return self._recorded is not None

    def start(self) -> None:
        """Start recording. Idempotent, since several workers may share a process."""
        if self._recorded is None:
            self._recorded, self._zero = [], time.time() - time.perf_counter()

    def take(self) -> list[Span]:
        """Stop recording and return the spans; empty at a second call."""
        recorded, self._recorded = self._recorded, None
        return recorded or []

    @contextmanager
    def at(self, track: str | None = None, lane: str | None = None) -> Iterator[None]:
        """Set track and lane of the spans inside. Values that are not given are inherited."""
        before = _place.get()
        token = _place.set((track or before[0], lane or before[1]))
        try:
            yield
        finally:
            _place.reset(token)

    @contextmanager
    def __call__(self, name: str, within: float | None = None, **args: Any) -> Iterator[None]:
        """Record the block as a span, also if it raises. within: its timeout in seconds, if it has one."""
        recorded, begin, (track, lane) = self._recorded, time.perf_counter(), _place.get()
        try:
            with HEARTBEAT.call(name, limit=within):
                yield
        finally:
            if recorded is not None:
                recorded.append(Span(track, lane, name, self._zero + begin, time.perf_counter() - begin, args))


SPANS = Spans()
"""Spans of this process."""


def start_spans() -> None:
    """Start recording in a worker process. A function is pickled by name; SPANS would be copied."""
    SPANS.start()


def take_spans() -> list[Span]:
    """Return the spans of a worker process."""
    return SPANS.take()
