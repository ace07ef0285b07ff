from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path

import pytest

from alphaapollo.observability.timing import Timer, read_torch_trace
from alphaapollo.trainer.profile import build_chrome_trace, write_trace
from alphaapollo.utils.heartbeat import Heartbeat, Span


def test_timer_adds_up_phases_that_end_or_fail_and_other_time() -> None:
    # start, generate 1-3, update 3-4 fails, generate 5-6, metrics at 10
    ticks = iter([0.0, 1.0, 3.0, 3.0, 4.0, 5.0, 6.0, 10.0])
    timer = Timer(clock=lambda: next(ticks))
    with timer("generate"):
        pass
    with pytest.raises(KeyError), timer("update"):
        raise KeyError
    with timer("generate"):
        pass
    assert timer.metrics() == {
        "timing/generate": 3.0,
        "timing/update": 1.0,
        "timing/other": 6.0,
        "timing/step": 10.0,
        "timing_share/generate": 0.3,
        "timing_share/update": 0.1,
        "timing_share/other": 0.6,
    }


def test_span_has_track_lane_and_wall_clock_time() -> None:
    spans, before = Heartbeat(), time.time()
    with spans.record_call("update"):
        pass
    assert spans.take_spans() == [], "spans are recorded only on request"
    spans.start_recording()

    async def play(name: str) -> None:
        with spans.use_track("rollout 1", name), spans.record_call("episode", number=name):
            await asyncio.sleep(0.01)
            with spans.record_call("generate"):
                await asyncio.sleep(0.01)

    async def play_both() -> None:
        await asyncio.gather(play("a"), play("b"))

    asyncio.run(play_both())
    spans.start_recording()  # by another worker of this process: what was noted stays
    inner, other, outer, _ = sorted(spans.take_spans(), key=lambda one: (one.name != "generate", one.lane))
    assert [(one.track, one.lane) for one in (inner, other, outer)] == [("rollout 1", lane) for lane in "aba"]
    assert outer.name == "episode" and outer.args == {"number": "a"} and before - 0.1 <= outer.start <= inner.start
    assert inner.start + inner.seconds <= outer.start + outer.seconds <= time.time() + 0.1
    assert spans.take_spans() == []


def test_a_trace_as_the_viewers_read_it(tmp_path: Path) -> None:
    spans = [
        Span("policy 10", "thread 5", "aten::mm", 100.002, 0.001),
        Span("policy 2", "thread 5", "aten::mm", 100.002, 0.001),
        Span("controller", "loop", "generate", 100.0, 0.002),
        *(Span("rollout 0", lane, "episode", start, 0.001) for lane, start in (("x", 100.0), ("y", 100.0005))),
        Span("rollout 0", "x", "generate", 100.0, 0.0005),
    ]
    write_trace(tmp_path / "profiles" / "step_000003.json.gz", spans)
    with gzip.open(tmp_path / "profiles" / "step_000003.json.gz") as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    assert trace == build_chrome_trace(spans) and trace["otherData"] == {"start": 100.0}
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(tracks.values()) == ["controller", "policy 2", "policy 10", "rollout 0"]
    shown = [(tracks[one["pid"]], one["name"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"]
    operators = [(track, "aten::mm", 2000.0, 1000.0) for track in ("policy 10", "policy 2")]
    assert shown == [("controller", "generate", 0.0, 2000.0), *operators]
    episodes = [one for one in events if one.get("cat") == "episodes"]
    assert {tracks[one["pid"]] for one in episodes} == {"rollout 0"} and len({one["id"] for one in episodes}) == 2
    starts, ends = ([(one["name"], one["ts"]) for one in episodes if one["ph"] == phase] for phase in "be")
    assert starts == [("episode", 0.0), ("generate", 0.0), ("episode", 500.0)]
    assert ends == [("episode", 1000.0), ("generate", 500.0), ("episode", 1500.0)]


def test_torchs_own_trace_is_read_as_spans() -> None:
    trace = {
        "baseTimeNanoseconds": 5_000_000_000,
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 7, "ts": 1e6, "dur": 30.0},
            {"ph": "X", "cat": "cpu_op", "name": "aten::view", "pid": 1, "tid": 7, "ts": 1e6, "dur": 1.0},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 3, "ts": 2e6, "dur": 1.0},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler", "pid": "Spans", "tid": "P", "ts": 0, "dur": 9e9},
            {"ph": "s", "cat": "ac2g", "name": "flow", "pid": 1, "tid": 7, "ts": 1e6},
        ],
    }
    assert read_torch_trace(trace, "policy 0") == [
        Span("policy 0", "thread 7", "aten::mm", 6.0, 30e-6),
        Span("policy 0", "stream 3", "gemm", 7.0, 1e-6),
    ]
