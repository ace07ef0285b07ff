"""Profile single iterations (trainer.profile_steps): one Chrome trace with the driver, training ranks and engines.

start_step(3) -> all processes record spans -> iteration 3 -> start_step(4) writes profiles/step_000003.json.gz

Perfetto (ui.perfetto.dev) and chrome://tracing show the track of a span (e.g. rollout 3) as a process, and its lane
(e.g. a thread) as a row.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.observability.console import Console
from alphaapollo.observability.timing import ROLLOUT, Timer
from alphaapollo.utils.disk import explain_write_errors, replace_file
from alphaapollo.utils.heartbeat import HEARTBEAT, Span
from alphaapollo.utils.json_types import JsonObject, to_json_value


class StepProfiler:
    """Profiler of the iterations in `steps`. The profile of an iteration also covers saving its checkpoint."""

    def __init__(self, steps: Sequence[int], workers: WorkerGroups, folder: Path, console: Console):
        self._steps, self._workers, self._folder, self._console = set(steps), workers, folder, console
        self._active: int | None = None

    async def start_step(self, step: int | None, timer: Timer) -> None:
        """Write the profile of the previous iteration, and start recording if iteration `step` is to be profiled.

        step: next iteration; None after the last one. timer: adds the time of this call to `timing/profile`.
        """
        ended, workers = self._active, self._workers
        self._active = step if step in self._steps else None
        if ended is None and self._active is None:
            return
        roles = [role for role in (workers.policy, workers.critic, workers.engines) if role]
        with timer("profile"):
            if ended is not None:
                spans = HEARTBEAT.take_spans()
                for worker_spans in await asyncio.gather(*(role.stop_profile() for role in roles)):
                    spans += worker_spans
                path = self._folder / "profiles" / f"step_{ended:06d}.json.gz"
                await asyncio.to_thread(write_trace, path, spans)
                self._console.notify(f"profile of iteration {ended} written to {path} (open it at ui.perfetto.dev)")
            if self._active is not None:
                HEARTBEAT.start_recording()
                await asyncio.gather(*(role.start_profile() for role in roles))


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write the spans as a gzipped trace. Raises an OSError that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = json.dumps(build_chrome_trace(spans), allow_nan=False, default=to_json_value)
    with explain_write_errors("the profile", path):
        replace_file(path, [gzip.compress(trace.encode(), compresslevel=5)])


def build_chrome_trace(spans: Sequence[Span]) -> JsonObject:
    """Convert spans to a trace in Chrome's format. Times are in microseconds since `otherData.start`, the unix time
    at which the first span starts. An episode is an asynchronous event, because many of them overlap."""
    trace_start = min((span.start for span in spans), default=0.0)
    lanes = sorted(
        {(span.track, span.lane) for span in spans}, key=lambda lane: (*_make_track_sort_key(lane[0]), lane[1])
    )
    pids = {track: pid for pid, track in enumerate(dict.fromkeys(track for track, _ in lanes))}
    events: list[JsonObject] = []
    for track, pid in pids.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": track}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
    for number, (track, lane) in enumerate(lanes):
        if not track.startswith(ROLLOUT):
            lane_name = {"ph": "M", "name": "thread_name", "pid": pids[track], "tid": number, "args": {"name": lane}}
            events.append(lane_name)
    numbers = {lane: number for number, lane in enumerate(lanes)}
    for span in sorted(spans, key=lambda span: (span.start, -span.seconds)):
        start, seconds = round((span.start - trace_start) * 1e6, 3), round(max(span.seconds, 0.0) * 1e6, 3)
        event = {"name": span.name, "pid": pids[span.track], "args": span.args}
        number = numbers[span.track, span.lane]
        if span.track.startswith(ROLLOUT):
            episode = event | {"cat": "episodes", "id": number, "tid": 0}
            events += [episode | {"ph": "b", "ts": start}, episode | {"ph": "e", "ts": start + seconds}]
        else:
            events.append(event | {"ph": "X", "tid": number, "ts": start, "dur": seconds})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start": trace_start}}


def _make_track_sort_key(track: str) -> tuple[bool, str, int]:
    """Return the sort key of a track: the controller first, then by role and number."""
    role, _, number = track.rpartition(" ")
    return (track != "controller", role, int(number) if number.isdigit() else 0)
