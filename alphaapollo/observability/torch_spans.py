"""Record operators and kernels of a training rank as spans, with torch's profiler."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from alphaapollo.observability.spans import Span

SHORTEST = 20e-6  # seconds; shorter operators are dropped to limit the size of a trace
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # GPU events, never dropped
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")

_running: tuple[str, Any] | None = None  # (track, profiler): torch allows one per process


def start_torch_profiler(track: str) -> None:
    """Start torch's profiler in this thread. Does nothing if another worker of this process is recording."""
    global _running
    if _running is not None:
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiler = profile(activities=activities, acc_events=True)
    profiler.start()
    _running = (track, profiler)


def take_torch_spans(track: str) -> list[Span]:
    """Stop torch's profiler and return the spans of `track`; empty if another track is being recorded."""
    global _running
    if _running is None or _running[0] != track:
        return []
    profiler, _running = _running[1], None
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(file)
        with open(file, encoding="utf-8", errors="replace") as opened:
            return read_torch_trace(json.load(opened), track)


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
