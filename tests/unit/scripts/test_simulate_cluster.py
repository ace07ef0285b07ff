"""The simulated cluster: its clock, bad input, and a small cluster."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaapollo.rollout.context import check_rows_match_turns
from alphaapollo.types import GroupRequest, Prompt, Sampling
from scripts.simulate_cluster import parse, simulate
from scripts.simulation.clock import Clock, Loop, PhaseTimer
from scripts.simulation.run import Cluster, Mode
from scripts.simulation.workers import FakeRollout, Latencies


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    """Restore garbage collection, which a run configures for a driver."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_waiting_is_skipped_and_counts() -> None:
    clock = Clock()
    loop = Loop(clock)
    begin = time.monotonic()
    loop.run_until_complete(asyncio.sleep(3600.0))
    assert 3600.0 <= clock() < 3602.0 and time.monotonic() - begin < 30
    loop.run_until_complete(asyncio.to_thread(time.sleep, 0.01))  # a thread is waited for
    loop.close()


def test_work_counts_and_that_of_the_fakes_does_not() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer("batch"):
        sum(range(300_000))
        with clock.elsewhere():
            sum(range(3_000_000))
        clock.charge(100.0)
    assert 100.0 < timer.work["batch"] < 105.0
    assert timer.work["batch"] == pytest.approx(timer.seconds["batch"], abs=0.1)
    assert timer.all_work == pytest.approx(clock.work(), abs=0.5)


def test_what_a_fake_engine_answers_is_what_a_real_one_could() -> None:
    latencies, clock = Latencies(response=20.0, longest=32), Clock()
    request = GroupRequest(Prompt(7, "simulated", "question"), 4, Sampling(32), stream_position=3)
    group = Loop(clock).run_until_complete(FakeRollout(latencies, clock).generate(request))
    longest = max(one.num_tokens for one in group.trajectories)
    assert clock.skipped == pytest.approx(longest / latencies.tokens_per_second + latencies.grading, rel=0.01)
    for one in group.trajectories:
        check_rows_match_turns(one.rows, one.turns, [turn.context_ids for turn in one.turns], [()] * len(one.turns))


def test_a_small_cluster(tmp_path: Path) -> None:
    """Two iterations of 4 workers with 8 trajectories each: the real loop, to metrics and rollouts."""
    latencies = Latencies(response=16.0, longest=32)
    cluster = Cluster(4, 8, 4, mini_batches=2, steps=2, latencies=latencies, folder=tmp_path)
    steps = cluster.run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["batch/trajectories"] == 32 and line["sync/probe_gap"] == 0 for line in lines)
    assert len((tmp_path / "rollouts" / "step_000002.jsonl").read_bytes().splitlines()) == 32
    for step, line in zip(steps, lines, strict=True):
        waited = line["response_length/max"] / 50 + latencies.publish
        assert waited < step.seconds < waited + 3.0 + sum(step.work.values())
        assert set(step.work) >= {"generate", "batch", "columns", "advantage", "update", "publish", "other"}
    calls = cluster.network.calls
    assert calls == 2 * (8 + 4 * 9)  # 8 groups, and 9 calls of every worker


@pytest.mark.parametrize("mode", ["carry", "separate"])
def test_an_asynchronous_run_is_quicker_where_lengths_differ(tmp_path: Path, mode: Mode) -> None:
    """Three iterations of the asynchronous loop. After the first one, some groups were generated during training."""
    latencies = Latencies(response=100.0, longest=1024, spread=1.0, update=200.0)
    waits = {}
    for kind in ("sync", mode):
        (folder := tmp_path / kind).mkdir()
        steps = Cluster(4, 8, 4, 2, steps=6, latencies=latencies, folder=folder, mode=kind).run()
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["batch/trajectories"] for line in lines] == [32.0] * 6
        waits[kind] = sum(step.seconds - sum(step.work.values()) for step in steps)
    assert lines[-1]["staleness/max"] <= 1 and max(line["async/carried"] for line in lines) > 0
    assert waits[mode] < 0.9 * waits["sync"]


def test_the_figures_of_a_size() -> None:
    args = parse(["--workers", "2", "--response", "16", "--longest", "32", "--steps", "2"])
    figures = simulate(2, args)
    assert figures["trajectories"] == 32 and figures["controller_share"] > 0
    assert sum(figures["seconds"].values()) == pytest.approx(figures["controller_share"] * figures["step_seconds"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--workers", "3", "--trajectories", "1"], "not a multiple of --group"),
        (["--workers", "0"], "not a multiple of --group"),
        (["--steps", "1"], "at least 2"),
        (["--mode", "async"], "invalid choice: 'async'"),
    ],
)
def test_invalid_value_is_refused(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argv)
    assert says in capsys.readouterr().err
