from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path

import pytest

from alphaapollo.observability.timing import Timer, read_torch_trace, start_profile, take_profile
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


def test_spans_are_recorded_only_on_request() -> None:
    spans = Heartbeat()
    with spans.use_track("policy 0"), spans.record_call("update"):
        pass
    assert spans._recorded is None and spans.take_spans() == []


def test_span_has_track_lane_and_wall_clock_time() -> None:
    spans = Heartbeat()
    spans.start_recording()
    before = time.time()

    async def episode(name: str) -> None:
        with spans.use_track(lane=name), spans.record_call("episode", number=name):
            await asyncio.sleep(0.01)
            with spans.record_call("generate"):
                await asyncio.sleep(0.01)

    async def play() -> None:
        with spans.use_track("rollout 1"):
            await asyncio.gather(episode("a"), episode("b"))

    asyncio.run(play())
    spans.start_recording()  # by another worker of this process: what was noted stays
    noted = spans.take_spans()
    assert [(one.track, one.lane, one.name) for one in sorted(noted, key=lambda one: (one.lane, one.name))] == [
        ("rollout 1", lane, name) for lane in ("a", "b") for name in ("episode", "generate")
    ]
    assert all(before - 0.1 <= one.start and one.start + one.seconds <= time.time() + 0.1 for one in noted)
    outer, inner = (
        next(one for one in noted if (one.lane, one.name) == ("a", name)) for name in ("episode", "generate")
    )
    assert outer.args == {"number": "a"} and outer.start <= inner.start
    assert inner.start + inner.seconds <= outer.start + outer.seconds
    assert spans._recorded is None and spans.take_spans() == []


def test_a_trace_as_the_viewers_read_it(tmp_path: Path) -> None:
    spans = [
        Span("policy 10", "thread 5", "aten::mm", 100.002, 0.001),
        Span("policy 2", "thread 5", "aten::mm", 100.002, 0.001),
        Span("controller", "loop", "generate", 100.0, 0.002),
        Span("rollout 0", "x", "episode", 100.0, 0.001, {"sample": 1}),
        Span("rollout 0", "x", "generate", 100.0, 0.0005),
        Span("rollout 0", "y", "episode", 100.0005, 0.001),
        Span("rollout 0", "z", "episode", 100.001, 0.001),
    ]
    write_trace(tmp_path / "profiles" / "step_000003.json.gz", spans)
    with gzip.open(tmp_path / "profiles" / "step_000003.json.gz") as file:
        trace = json.load(file)
    assert trace == build_chrome_trace(spans) and trace["otherData"] == {"start": 100.0}
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if "name" in e["args"]}
    tracks = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
    assert list(tracks.values()) == ["controller", "policy 2", "policy 10", "rollout 0"]
    shown = [
        (tracks[e["pid"]], names["thread_name", e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    ]
    assert shown == [
        ("controller", "loop", "generate", 0.0, 2000.0),
        ("policy 10", "thread 5", "aten::mm", 2000.0, 1000.0),
        ("policy 2", "thread 5", "aten::mm", 2000.0, 1000.0),
    ]
    episodes = [e for e in trace["traceEvents"] if e.get("cat") == "episodes"]
    assert {tracks[e["pid"]] for e in episodes} == {"rollout 0"} and len({e["id"] for e in episodes}) == 3
    starts, ends = ([(e["name"], e["ts"]) for e in episodes if e["ph"] == phase] for phase in "be")
    assert starts == [("episode", 0.0), ("generate", 0.0), ("episode", 500.0), ("episode", 1000.0)]
    assert ends == [("episode", 1000.0), ("generate", 500.0), ("episode", 1500.0), ("episode", 2000.0)]


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


def test_torch_is_recorded_on_the_same_clock() -> None:
    import torch

    before = time.time()
    start_profile("policy 0")
    start_profile("critic 0")  # torch has one profiler a process
    (torch.ones(400, 400) @ torch.ones(400, 400)).sum()
    assert take_profile("critic 0") == []
    spans = take_profile("policy 0")
    product = next(span for span in spans if span.name == "aten::mm")
    assert before - 0.1 <= product.start and product.start + product.seconds <= time.time() + 0.1
    assert take_profile("policy 0") == []
