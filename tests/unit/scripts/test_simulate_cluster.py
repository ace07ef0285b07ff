"""The simulated cluster: its fake engine, bad input, and small clusters."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaapollo.rollout.token_context import check_rows_match_turns
from alphaapollo.types import GroupRequest, Prompt, Sampling
from scripts.simulation.clock import Clock, Loop
from scripts.simulation.run import Cluster
from scripts.simulation.workers import FakeRollout, Latencies


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    """Restore garbage collection, which a run configures for a driver."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


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
    assert calls == 2 * (8 + 4 * 12)  # 8 groups, and 12 calls of every worker
