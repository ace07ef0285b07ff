"""Time the phases of an iteration, such as generate and update, and record workers for a trace (trainer/profile.py)."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from alphaapollo.utils.heartbeat import HEARTBEAT, Span

ROLLOUT = "rollout "  # prefix of the tracks of rollout workers, whose lanes are episodes
MIN_SECONDS = 20e-6  # shorter host events are dropped to limit the size of a trace
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")  # never dropped
HOST_EVENTS = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_running: tuple[str, Any] | None = None  # (track, profiler): torch allows one per process


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
        return make_timing_metrics({**self.seconds, "other": step - sum(self.seconds.values())}, step)


def make_timing_metrics(seconds: Mapping[str, float], step: float) -> dict[str, float]:
    """Return timing/PHASE and timing/step in seconds, and timing_share/PHASE. step: total seconds."""
    metrics = {f"timing/{phase}": spent for phase, spent in seconds.items()} | {"timing/step": step}
    return metrics | {f"timing_share/{phase}": spent / step if step else 0.0 for phase, spent in seconds.items()}


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
        profiler = profile(activities=activities, acc_events=True)
        _running = (track, profiler)
        profiler.start()


def take_profile(track: str) -> list[Span]:
    """Stop recording in a worker process and return the spans of `track`; empty if another track is recorded."""
    global _running
    if track.startswith(ROLLOUT):
        return HEARTBEAT.take_spans()
    running_track, profiler = _running or ("", None)
    if profiler is None or running_track != track:
        return []
    _running = None
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
        if event.get("ph") != "X" or not (kind in DEVICE_EVENTS or (kind in HOST_EVENTS and seconds >= MIN_SECONDS)):
            continue
        lane = f"stream {event['tid']}" if kind in DEVICE_EVENTS else f"thread {event['tid']}"
        spans.append(Span(track, lane, event["name"], base + event["ts"] / 1e6, seconds))
    return spans


def measure_process_memory() -> dict[str, float]:
    """Return the memory metrics of this process: current and peak resident memory, and GPU memory reserved by torch."""
    import torch

    metrics = {
        "rss_gib": measure_resident_gib(),
        "rss_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if torch.cuda.is_available():
        metrics["cuda_gib"] = torch.cuda.memory_reserved() / 2**30
        metrics["cuda_peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return metrics


def measure_resident_gib() -> float:
    """Return the resident memory of this process in GiB."""
    return float(psutil.Process().memory_info().rss) / 2**30


def read_peak_memory_gib(pid: int) -> float:
    """Return the peak resident memory of a process in GiB; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), "0")
    return int(kib) / 2**20
