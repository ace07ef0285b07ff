"""When a stall is reported, and when it ends the run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller.health import stall_monitor
from alphaapollo.controller.health.stall_detector import RunSnapshot
from alphaapollo.controller.health.stall_monitor import StallMonitor
from alphaapollo.controller.ranks import LocalRanks, RunStalled, get_enclosing_method_name
from alphaapollo.utils.heartbeat import HEARTBEAT, ActiveCall, read_process
from tests.unit.controller.health.test_stall_detector import UPDATE, answers, process, silent, snapshot

pytestmark = pytest.mark.timeout(60)


def trainer(folder: Path, notice: float, timeout: float | None) -> Any:
    return SimpleNamespace(folder=folder, stall_notice_seconds=notice, stall_timeout=timeout)


class Replay(StallMonitor):
    """A monitor with snapshots from the test."""

    def __init__(self, take_snapshot: Callable[[], RunSnapshot], *arguments: Any):
        super().__init__([], *arguments)
        self.take_snapshot = take_snapshot  # type: ignore[method-assign]


class Case:
    """A monitor with notice 60 s and timeout 600 s, with snapshots from the test."""

    def __init__(self, tmp_path: Path, timeout: float | None = 600.0):
        self.lines: list[str] = []
        self.asked = 0
        self.now: RunSnapshot = snapshot()
        next_step = "stopped; the same command resumes from step_20"
        self.monitor = Replay(
            self.take_snapshot, trainer(tmp_path, 60.0, timeout), "cpu", self.lines.append, lambda: next_step
        )
        self.ended: list[str] = []
        self.monitor._end_run = lambda finding, now: self.ended.append(finding.verdict)  # type: ignore[method-assign]
        self.monitor.check_progress(6.0)

    def take_snapshot(self) -> RunSnapshot:
        self.asked += 1
        return self.now

    def wait(self, seconds: int) -> None:
        for _ in range(seconds // 6):
            self.monitor.check_progress(6.0)


STOPPED = snapshot(answers("policy 0", 10), silent("policy 1", 11, process(11, "stopped")), calls=UPDATE)


def test_workers_are_not_asked_while_this_process_makes_progress(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for _ in range(200):
        HEARTBEAT.tick()
        case.monitor.check_progress(6.0)
    assert case.asked == 0 and not case.lines


def test_a_stall_is_reported_once_and_ends_the_run_at_the_timeout(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.now = STOPPED
    case.wait(54)
    assert not case.lines
    case.wait(540)
    (line,) = case.lines
    assert line.startswith("no progress for 60 s, since ")
    assert "the policy 1 (pid 11) is stopped" in line and "600 s (trainer.stall_timeout)" in line
    assert not case.ended
    case.wait(6)
    assert len(case.ended) == 1


def test_a_failure_of_the_monitor_is_reported_once_and_it_continues(tmp_path: Path) -> None:
    lines: list[str] = []
    snapshots = [ValueError("no text"), ValueError("no text"), snapshot()]
    done = threading.Event()

    def take_snapshot() -> RunSnapshot:
        one = snapshots.pop(0)
        if isinstance(one, Exception):
            raise one
        done.set()
        snapshots.append(one)
        return one

    async def wait() -> None:
        async with Replay(take_snapshot, trainer(tmp_path, 1.0, None), "cpu", lines.append, str):
            assert await asyncio.to_thread(done.wait, 30)

    asyncio.run(wait())
    failures = [line for line in lines if "stall monitor failed" in line]
    assert len(failures) == 1 and "ValueError: no text" in failures[0]


def test_null_never_ends_the_run(tmp_path: Path) -> None:
    case = Case(tmp_path, timeout=None)
    case.now = STOPPED
    case.wait(6000)
    assert len(case.lines) == 1 and "The run ends" not in case.lines[0] and not case.ended


def test_a_slow_worker_is_not_hung(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for number in range(1000):  # 100 minutes
        case.now = snapshot(answers("policy 0", 10, cpu=number), calls=UPDATE, at=6.0 * number)
        case.monitor.check_progress(6.0)
    (line,) = case.lines
    assert "the policy 0 (pid 10) computes" in line and "The run ends" not in line and not case.ended


def test_counts_of_workers_are_progress_and_the_end_of_a_stall_is_reported(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for number in range(1000):  # a long answer, token by token
        case.now = snapshot(answers("rollout 0", 10, ticks=number), calls=UPDATE)
        case.monitor.check_progress(6.0)
    assert not case.lines and not case.ended
    case.now = STOPPED
    case.wait(120)
    HEARTBEAT.tick()
    case.wait(6)
    assert [line.split(":")[0].split(",")[0] for line in case.lines] == ["no progress for 60 s", "progress again"]


def test_a_call_gets_its_own_timeout(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.now = snapshot(answers("policy 0", 10, calls=[ActiveCall("environment.step", "", 1, 9, 900.0)]), calls=UPDATE)
    case.wait(924)
    assert not case.ended
    case.wait(6)
    assert len(case.ended) == 1


def run_stalled(tmp_path: Path, lines: list[str], block: Callable[[], Coroutine[Any, Any, None]]) -> RunStalled:
    """Error of a block during which a worker is stopped."""
    alone = snapshot(silent("policy 1", 11, process(11, "stopped")), calls=UPDATE)

    async def stall() -> None:
        take_snapshot = iter([alone] * 1000).__next__
        async with Replay(take_snapshot, trainer(tmp_path, 0.1, 0.3), "cpu", lines.append, lambda: "stopped; resume"):
            await block()

    with pytest.raises(RunStalled) as caught:
        asyncio.run(stall())
    return caught.value


def test_error_names_the_blocking_process_and_has_stacks(tmp_path: Path) -> None:
    lines: list[str] = []
    error = run_stalled(tmp_path, lines, lambda: asyncio.sleep(50))
    assert error.culprits == ["policy 1"] and lines
    (file,) = (tmp_path / "stalls").iterdir()
    assert f"{file}; stopped; resume" in str(error)
    assert "=== the policy 1 (pid 11)\n--- process 11\n" in file.read_text()


def test_block_that_ignores_a_cancel_is_cancelled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_monitor, "GRACE_SECONDS", 0.5)

    async def block() -> None:
        try:
            await asyncio.sleep(50)
        finally:
            await asyncio.sleep(50)  # a checkpoint that is being written

    run_stalled(tmp_path, [], block)


def test_a_block_that_ends_by_itself_is_left_alone(tmp_path: Path) -> None:
    async def work() -> None:
        async with Replay(snapshot, trainer(tmp_path, 0.1, 0.2), "cpu", print, str):
            raise KeyError("its own")

    with pytest.raises(KeyError):
        asyncio.run(work())


BLOCKED = """
import asyncio, sys, time
from pathlib import Path
from types import SimpleNamespace
from alphaapollo.controller.health import stall_monitor
from alphaapollo.controller.health.stall_monitor import StallMonitor
stall_monitor.GRACE_SECONDS = 0.2

async def main():
    trainer = SimpleNamespace(folder=Path(sys.argv[1]), stall_notice_seconds=1.0, stall_timeout=2.0)
    async with StallMonitor([], trainer, "cpu", print, lambda: "stopped"):
        time.sleep(50)

asyncio.run(main())
"""


def test_a_blocked_event_loop_ends_too(tmp_path: Path) -> None:
    command, folder = [sys.executable, "-c", BLOCKED, str(tmp_path)], Path(__file__).parents[4]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: no progress for ") and "the controller (pid " in done.stderr
    (file,) = (tmp_path / "stalls").iterdir()
    assert "in main" in file.read_text() or "main (<string>" in file.read_text()


class Group:
    async def update(self, ranks: LocalRanks[Any]) -> list[Any]:
        return await ranks.call(
            lambda worker: [one.name for one in HEARTBEAT.make_process_tree_report().calls if one.worker == "str 0"]
        )


def test_a_call_has_the_name_of_its_method() -> None:
    assert asyncio.run(Group().update(LocalRanks("worker"))) == [["update"]]
    assert get_enclosing_method_name(partial(print, "x")) == "call"


def test_a_stopped_required_process_is_reported_during_progress(tmp_path: Path) -> None:
    lines: list[str] = []
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    required = {"Ray's raylet": raylet.pid}
    monitor = Replay(snapshot, trainer(tmp_path, 60.0, 600.0), "cpu", lines.append, str, required)

    def wait(state: bool) -> None:
        while not (seen := read_process(raylet.pid)) or seen.is_suspended is not state:
            time.sleep(0.01)
        for _ in range(20):
            HEARTBEAT.tick()
            monitor.check_progress(6.0)

    try:
        wait(False)
        assert lines == []
        for times in (1, 2):
            raylet.send_signal(signal.SIGSTOP)
            wait(True)
            assert len(lines) == times and f"Ray's raylet (pid {raylet.pid}) is stopped" in lines[-1]
            raylet.send_signal(signal.SIGCONT)
            wait(False)
    finally:
        raylet.kill()
        raylet.wait()
