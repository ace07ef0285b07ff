"""Record a worker for a trace: its spans (utils/heartbeat.py) or, on training ranks, torch's operators and kernels.

The controller collects what all processes have recorded (trainer/profile.py) into one trace.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from alphaapollo.utils.heartbeat import HEARTBEAT, Span

ROLLOUT = "rollout "  # prefix of the tracks of rollout workers, whose lanes are episodes
SHORTEST = 20e-6  # seconds; shorter operators are dropped to limit the size of a trace
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # GPU events, never dropped
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_running: tuple[str, Any] | None = None  # (track, profiler): torch allows one per process


def start_profile(track: str) -> None:
    """Start recording in a worker process: torch's operators on a training rank, spans on a rollout worker. Does
    nothing on a training rank if another worker of this process is recording."""
    global _running
    if track.startswith(ROLLOUT):
        HEARTBEAT.start_recording()
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
        return HEARTBEAT.take_spans()
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
