"""Time the operations of a process as spans. Spans are recorded for a trace in the iterations that
trainer.profile_steps lists, and always reported to stall detection (utils/heartbeat.py).

    with SPANS.use_track("rollout 0", "train.12.0.3"):     # for this asyncio task and tasks that it starts
        with SPANS("generate", tokens=83):          # negligible cost unless recording
            ...

Each process records its own spans; the controller collects them (trainer/profile.py) into one trace. On training ranks,
torch's profiler records operators and kernels.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alphaapollo.utils.heartbeat import HEARTBEAT
from alphaapollo.utils.json_types import JsonObject

ROLLOUT = "rollout "  # prefix of the tracks of rollout workers, whose lanes are episodes
SHORTEST = 20e-6  # seconds; shorter operators are dropped to limit the size of a trace
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # GPU events, never dropped
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_running: tuple[str, Any] | None = None  # (track, profiler): torch allows one per process


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


def start_profile(track: str) -> None:
    """Start recording in a worker process: torch's operators on a training rank, spans on a rollout worker. Does
    nothing on a training rank if another worker of this process is recording."""
    global _running
    if track.startswith(ROLLOUT):
        SPANS.start()
    elif _running is None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        _running = (track, profile(activities=activities, acc_events=True))
        _running[1].start()


def take_profile(track: str) -> list[Span]:
    """Stop recording in a worker process and return the spans of `track`; empty if another track is recorded."""
    global _running
    if track.startswith(ROLLOUT):
        return SPANS.take_spans()
    if _running is None or _running[0] != track:
        return []
    profiler, _running = _running[1], None
    profiler.stop()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return read_torch_trace(json.loads(Path(file.name).read_text(encoding="utf-8", errors="replace")), track)


def read_torch_trace(trace: dict[str, Any], track: str) -> list[Span]:
    """Convert a trace of torch's profiler to spans. Times in the trace are microseconds since baseTimeNanoseconds."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e9
    spans = []
    for event in trace["traceEvents"]:
        kind = event.get("cat", "")
        seconds = event.get("dur", 0.0) / 1e6
        if event.get("ph") != "X" or not (kind in DEVICE or (kind in HOST and seconds >= SHORTEST)):
            continue
        lane = f"stream {event['tid']}" if kind in DEVICE else f"thread {event['tid']}"
        spans.append(Span(track, lane, event["name"], base + event["ts"] / 1e6, seconds))
    return spans
