"""What a command does, for people who cannot see its console: status.json, the activity, and the remaining time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alphaapollo.observability import console as console_module
from alphaapollo.observability.console import Console, find_activity
from alphaapollo.observability.console_view import ConsoleView, compute_expected_tokens
from alphaapollo.observability.terminal import Terminal
from alphaapollo.runs.run_status import read_run_status
from alphaapollo.utils.heartbeat import HEARTBEAT
from tests.builders import make_group, make_trajectory, make_turn


def test_time_left_follows_the_sampled_tokens():
    view = ConsoleView(total_steps=5)
    assert view.format_time_left(0.0) == ""
    for step, (tokens, elapsed) in enumerate([(100, 60.0), (100, 90.0), (200, 140.0)]):  # 10 s + 0.2 s per token
        view.update(step, {"rollout/tokens": tokens, "timing/validate": 10.0}, elapsed)
    assert compute_expected_tokens(view.costs) == 150
    assert view.estimate_seconds_left(140.0) == pytest.approx(3 * (10 + 0.2 * 150))
    assert view.estimate_seconds_left(145.0) == pytest.approx(115)
    view.tokens = 350  # more than expected, in the running iteration
    assert view.estimate_seconds_left(145.0) == pytest.approx(115 + 0.2 * 200)
    view.update(3, {"rollout/tokens": 0.0}, 150.0)
    assert view.tokens == 0
    view.update(5, {}, 160.0)
    assert view.format_time_left(160.0) == ""


def test_status_file_says_what_the_command_does_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    console, now = Console(Terminal(quiet=True)), [0.0]
    monkeypatch.setattr(console_module, "find_activity", lambda: "update: policy 0")
    monkeypatch.setattr(Console, "elapsed", property(lambda self: now[0]))
    console.refresh()
    assert read_run_status(tmp_path) is None, "no folder yet"
    console.status_folder = tmp_path / "removed"
    console.refresh()
    console.status_folder = tmp_path
    monkeypatch.setattr(console_module, "STATUS_SECONDS", 0.0)
    console.start(total_steps=8, completed_steps=2)
    console.refresh()
    first = read_run_status(tmp_path)
    assert first and (first.phase, first.detail, first.step, first.pid) == ("update", "policy 0", 2, os.getpid())
    assert first.seconds_left is None
    for step in (3, 4):
        now[0] += 10
        console.show_step(step, {"rollout/tokens": 100.0})
    console.show_phase("generate", 3, 32)
    console.count_tokens([make_group(make_trajectory(make_turn([1, 2, 3])))])
    console.refresh()
    status = read_run_status(tmp_path)
    assert status and (status.phase, status.detail, status.tokens) == ("generate", "3/32", 3)
    assert (status.expected_tokens, status.seconds_left) == (100, 40)
    console.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(autouse=True)
def empty_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HEARTBEAT, "_open_calls", {})


def test_the_oldest_operation_of_this_process_and_the_workers_it_waits_for() -> None:
    assert find_activity() == ""
    with HEARTBEAT.record_call("compute_values", "critic 0"):
        assert find_activity() == "compute values: critic 0"
        with HEARTBEAT.record_call("update"), HEARTBEAT.record_call("batch"):
            assert find_activity() == "update: critic 0"
            keys = [HEARTBEAT.begin_call("update", f"policy {rank}") for rank in range(4)]
            assert find_activity() == "update: critic 0, policy 0, policy 1, ..."
            for key in keys:
                HEARTBEAT.end_call(key)
    with HEARTBEAT.record_call("prepare"), HEARTBEAT.record_call("read prompts"):
        assert find_activity() == "prepare: read prompts"
    assert find_activity() == ""
