"""Write spans as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: one process per track, one thread per
lane."""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphaapollo.observability.disk import writing
from alphaapollo.observability.json_values import plain
from alphaapollo.observability.spans import Span

SHARED = "rollout "
"""Prefix of tracks with one short lane per episode; sequential episodes share a row."""


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write gzipped JSON. Raises OSError that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with writing("the profile", part):
        with gzip.open(part, "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump(chrome_trace(spans), file, allow_nan=False, default=plain)
        part.replace(path)


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Build the trace. Times are microseconds since the first span; `otherData` has its unix time."""
    zero = min((span.start for span in spans), default=0.0)
    tracks = {track: number for number, track in enumerate(sorted({span.track for span in spans}, key=_order))}
    rows = {track: _rows([span for span in spans if span.track == track], track) for track in tracks}
    events: list[dict[str, Any]] = []
    for track, pid in tracks.items():
        events.append(_name("process_name", pid, 0, track))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        named = {row: f"episodes {row}" if track.startswith(SHARED) else lane for lane, row in rows[track].items()}
        events += [_name("thread_name", pid, row, name) for row, name in sorted(named.items())]
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


def _order(track: str) -> tuple[bool, str, int]:
    """Sort key: the controller first, then by role and number."""
    role, _, number = track.rpartition(" ")
    return (track != "controller", role, int(number) if number.isdigit() else 0)


def _rows(spans: Sequence[Span], track: str) -> dict[str, int]:
    """Assign a row to each lane. On shared tracks a lane gets the first row that is free for its duration."""
    lanes: dict[str, tuple[float, float]] = {}
    for span in spans:
        begin, end = lanes.get(span.lane, (span.start, span.start))
        lanes[span.lane] = min(begin, span.start), max(end, span.start + span.seconds)
    if not track.startswith(SHARED):
        return {lane: row for row, lane in enumerate(sorted(lanes))}
    rows: dict[str, int] = {}
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for lane, (begin, end) in sorted(lanes.items(), key=lambda item: item[1]):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[lane] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, rows[lane]))
    return rows


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
