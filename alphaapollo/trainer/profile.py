"""Profile single iterations (trainer.profile_steps): one Chrome trace with the driver, training ranks and engines.

start_step(3) -> all processes record spans -> iteration 3 -> start_step(4) writes profiles/step_000003.json.gz

Perfetto (ui.perfetto.dev) and chrome://tracing show the track of a span (e.g. rollout 3) as a process, and its lane
(e.g. an episode) as a thread.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from alphaapollo.controller.worker_groups import WorkerGroups
from alphaapollo.observability.console import Console
from alphaapollo.observability.disk import explain_write_errors, replace_file
from alphaapollo.observability.json_values import to_json_value
from alphaapollo.observability.spans import SPANS, Span
from alphaapollo.observability.timing import Timer
from alphaapollo.utils.json_types import JsonObject

EPISODES = "rollout "
"""Prefix of tracks with one lane per episode. In these tracks, sequential episodes share a row."""


class StepProfiler:
    """Profiler of the iterations in `steps`. The profile of an iteration also covers saving its checkpoint."""

    def __init__(self, steps: Sequence[int], workers: WorkerGroups, folder: Path, console: Console):
        self._steps, self._workers, self._folder, self._console = set(steps), workers, folder, console
        self._active: int | None = None

    async def start_step(self, step: int | None, timer: Timer) -> None:
        """Write the profile of the previous iteration, and start recording if iteration `step` is to be profiled.

        step: next iteration; None after the last one. timer: adds the time of this call to `timing/profile`.
        """
        ended, self._active = self._active, step if step in self._steps else None
        if ended is None and self._active is None:
            return
        workers = self._workers
        roles = [role for role in (workers.policy, workers.critic, workers.engines) if role]
        with timer("profile"):
            if ended is not None:
                spans = SPANS.take_spans()
                for worker_spans in await asyncio.gather(*(role.stop_profile() for role in roles)):
                    spans += worker_spans
                path = self._folder / "profiles" / f"step_{ended:06d}.json.gz"
                await asyncio.to_thread(write_trace, path, spans)
                self._console.notify(f"profile of iteration {ended} written to {path} (open it at ui.perfetto.dev)")
            if self._active is not None:
                SPANS.start()
                await asyncio.gather(*(role.start_profile() for role in roles))


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write the spans as a gzipped trace. Raises an OSError that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    trace = json.dumps(build_chrome_trace(spans), allow_nan=False, default=to_json_value)
    with explain_write_errors("the profile", path):
        replace_file(path, [gzip.compress(trace.encode(), compresslevel=5)])


def build_chrome_trace(spans: Sequence[Span]) -> JsonObject:
    """Convert spans to a trace in Chrome's format. Times are in microseconds since `otherData.start`, the unix time
    at which the first span starts."""
    zero = min((span.start for span in spans), default=0.0)
    tracks = {
        track: number for number, track in enumerate(sorted({span.track for span in spans}, key=_make_track_sort_key))
    }
    rows = {track: _assign_rows([span for span in spans if span.track == track], track) for track in tracks}
    events: list[JsonObject] = []
    for track, pid in tracks.items():
        events.append(_make_name_event("process_name", pid, 0, track))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        named = {row: f"episodes {row}" if track.startswith(EPISODES) else lane for lane, row in rows[track].items()}
        events += [_make_name_event("thread_name", pid, row, name) for row, name in sorted(named.items())]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": tracks[span.track],
            "tid": rows[span.track][span.lane],
            "ts": round((span.start - zero) * 1e6, 3),
            "dur": round(max(span.seconds, 0.0) * 1e6, 3),
            "args": span.args,
        }
        for span in sorted(spans, key=lambda span: (span.start, -span.seconds))
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start": zero}}


def _make_track_sort_key(track: str) -> tuple[bool, str, int]:
    """Return the sort key of a track: the controller first, then by role and number."""
    role, _, number = track.rpartition(" ")
    return (track != "controller", role, int(number) if number.isdigit() else 0)


def _assign_rows(spans: Sequence[Span], track: str) -> dict[str, int]:
    """Return {lane: row in the trace viewer} of a track. Episodes that do not overlap in time may share a row."""
    lanes: dict[str, tuple[float, float]] = {}
    for span in spans:
        begin, end = lanes.get(span.lane, (span.start, span.start))
        lanes[span.lane] = min(begin, span.start), max(end, span.start + span.seconds)
    if not track.startswith(EPISODES):
        return {lane: row for row, lane in enumerate(sorted(lanes))}
    rows: dict[str, int] = {}
    ends: list[float] = []  # of the last episode in each row
    for lane, (begin, end) in sorted(lanes.items(), key=lambda item: item[1]):
        rows[lane] = next((row for row, last in enumerate(ends) if last <= begin), len(ends))
        ends[rows[lane] : rows[lane] + 1] = [end]
    return rows


def _make_name_event(event_type: str, pid: int, tid: int, name: str) -> JsonObject:
    """Build a metadata event (process_name or thread_name) that names a process or thread in the trace viewer."""
    return {"ph": "M", "name": event_type, "pid": pid, "tid": tid, "args": {"name": name}}
