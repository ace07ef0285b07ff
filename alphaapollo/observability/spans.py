"""Time the operations of a process as spans. Spans are recorded for a trace in the iterations that
trainer.profile_steps lists, and always reported to stall detection (utils/heartbeat.py).

    with SPANS.use_track("rollout 0", "train.12.0.3"):     # for this asyncio task and tasks that it starts
        with SPANS("generate", tokens=83):          # negligible cost unless recording
            ...

Each process records its own spans; the controller collects them (trainer/profile.py) into one trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class Span:
    """Timed operation, shown as a bar in the trace. Spans of one lane are sequential or nested."""

    track: str  # process or worker, e.g. controller, policy 0, rollout 3
    lane: str  # sequential part of the track, e.g. a thread or an episode
    name: str
    start: float  # unix seconds
    seconds: float
    args: JsonObject = field(default_factory=dict)


_track_and_lane: ContextVar[tuple[str, str]] = ContextVar("track_and_lane", default=("controller", "loop"))


class SpanRecorder:
    """Recorder of the spans of a process, timed by a monotonic clock that starts at wall-clock time."""

    def __init__(self) -> None:
        self._recorded: list[Span] | None = None
        self._zero = 0.0  # unix time of the monotonic clock's zero

    def start(self) -> None:
        """Start recording. Idempotent, since several workers may share a process."""
        if self._recorded is None:
            self._recorded, self._zero = [], time.time() - time.perf_counter()

    def take_spans(self) -> list[Span]:
        """Stop recording and return the recorded spans; empty if not recording."""
        recorded, self._recorded = self._recorded, None
        return recorded or []

    @contextmanager
    def use_track(self, track: str | None = None, lane: str | None = None) -> Iterator[None]:
        """Context manager that sets the track and lane of the spans in its block. None: keep the current value."""
        before = _track_and_lane.get()
        token = _track_and_lane.set((track or before[0], lane or before[1]))
        try:
            yield
        finally:
            _track_and_lane.reset(token)

    @contextmanager
    def __call__(self, name: str, timeout: float | None = None, **args: object) -> Iterator[None]:
        """Context manager that records its block as a span, even if the block raises.

        timeout: timeout of the block in seconds, for stall detection; None: no timeout. args: shown in the trace.
        """
        recorded, begin, (track, lane) = self._recorded, time.perf_counter(), _track_and_lane.get()
        try:
            with HEARTBEAT.record_call(name, timeout=timeout):
                yield
        finally:
            if recorded is not None:
                recorded.append(Span(track, lane, name, self._zero + begin, time.perf_counter() - begin, args))


SPANS = SpanRecorder()
"""Spans of this process."""


def start_recording_spans() -> None:
    """Start recording spans in this worker process. Sending it the method SPANS.start would start a copy of SPANS."""
    SPANS.start()


def take_recorded_spans() -> list[Span]:
    """Stop recording in a worker process and return its spans."""
    return SPANS.take_spans()
