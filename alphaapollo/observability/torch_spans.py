"""torch's profiler in the process of a training rank: operators and kernels as spans."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from alphaapollo.observability.spans import Span

SHORTEST = 20e-6  # seconds: what is shorter is left out, or a trace has millions of them
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # kinds of what runs on a GPU: kept whatever it takes
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")

_running: tuple[str, Any] | None = None  # (track, profiler): torch has one a process


def start_torch_spans(track: str) -> None:
    """Record from now on, in this thread; nothing where another worker of the process does so already."""
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
    """What was recorded for `track`; the recording ends."""
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
    """The spans of torch's own trace, whose times count from its baseTimeNanoseconds in microseconds."""
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
