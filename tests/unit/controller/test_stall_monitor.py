"""Which worker is named if a run stalls, when a stall is reported, and when it ends the run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller import stall_monitor
from alphaapollo.controller.ranks import LocalRanks, RunStalled, WorkerReport, get_enclosing_method_name
from alphaapollo.controller.stall_monitor import Stall, StallMonitor, find_stall
from alphaapollo.utils.heartbeat import HEARTBEAT, ActiveCall, ProcessStatus, Report, read_process

Reports = list[WorkerReport]
UPDATE = [
    *(ActiveCall("update", f"policy {rank}", 1, 62, None) for rank in (0, 1)),
    ActiveCall("update", "", 1, 63, None),
]
PLAY = [
    ActiveCall("generate", "", 1, 63, None),
    *(ActiveCall("play", f"rollout {rank}", 4, 62, None) for rank in (0, 1)),
]


def process(pid: int, stopped: bool = False, cpu: float = 1.0, name: str = "", required: bool = True) -> ProcessStatus:
    return ProcessStatus(pid, name or f"process {pid}", stopped, cpu, required)


def answers(
    key: str, pid: int, *more: ProcessStatus, calls: Sequence[ActiveCall] = (), ticks: int = 7, cpu: float = 1.0
) -> WorkerReport:
    report = Report(ticks, tuple(calls), (process(pid, cpu=cpu), *more))
    return WorkerReport(key, f"the {key} (pid {pid})", pid, report)


def silent(key: str, pid: int, known: ProcessStatus | None = None, node: str = "") -> WorkerReport:
    return WorkerReport(key, f"the {key} (pid {pid})", pid, Report(None, processes=(known,) if known else ()), node)


def reports(*workers: WorkerReport, calls: Sequence[ActiveCall] = (), ticks: int = 3, cpu: float = 1.0) -> Reports:
    return [answers("controller", 1, calls=calls, ticks=ticks, cpu=cpu), *workers]


def find(before: Reports, now: Reports | None = None, device: str = "cpu") -> Stall:
    stall = find_stall(before, before if now is None else now, 6.0, device)  # type: ignore[arg-type]
    assert stall
    return stall


def progresses(before: Reports, now: Reports, device: str = "cpu") -> bool:
    return find_stall(before, now, 6.0, device) is None  # type: ignore[arg-type]


STOPPED = reports(answers("policy 0", 10), silent("policy 1", 11, process(11, True)), calls=UPDATE)


def test_a_stopped_rank_of_a_collective_is_named() -> None:
    spins = [
        reports(answers("policy 0", 10, cpu=cpu), silent("policy 1", 11, process(11, True)), calls=UPDATE)
        for cpu in (0.0, 6.0)
    ]
    stall = find(*spins)
    assert [one.worker for one in stall.culprits] == ["policy 1"]
    assert stall.verdict.startswith("the policy 1 (pid 11) is stopped") and "-CONT" in stall.verdict
    for fact in ("in update", "update of policy 0 (62 s), update of policy 1 (62 s)"):
        assert fact in stall.verdict


def test_a_stopped_engine_core_or_service_is_named() -> None:
    core = process(21, True, name="the engine core of rollout worker 1")
    one = reports(answers("rollout 0", 10), answers("rollout 1", 20, core), calls=PLAY)
    assert find(one).culprits == (one[2],)
    assert find(one).verdict.startswith("the engine core of rollout worker 1 (pid 21) is stopped")
    raylet = [answers("controller", 1, process(71, True, name="Ray's raylet"), calls=UPDATE)]
    assert find(raylet).verdict.startswith("Ray's raylet (pid 71) is stopped")


def test_cpu_time_is_progress_only_without_gpus() -> None:
    def at(cpu: float) -> Reports:
        return reports(answers("policy 0", 10, cpu=cpu), answers("policy 1", 11), calls=UPDATE)

    assert progresses(at(5.0), at(5.6))  # a tenth of a core: the machine is busy
    assert not progresses(at(5.0), at(5.6), "cuda")
    assert not progresses(at(5.0), at(5.1))  # waiting processes wake up now and then
    for device in ("cpu", "cuda"):  # a grader and a controller that waits for no worker do not wait for a GPU
        graded = [
            reports(answers("rollout 0", 10, process(12, cpu=cpu, required=False)), calls=PLAY) for cpu in (0.0, 6.0)
        ]
        assert progresses(*graded, device) and progresses(reports(), reports(cpu=4.0), device)


def test_counts_are_progress() -> None:
    before = reports(answers("rollout 0", 10, ticks=100), calls=PLAY)
    assert progresses(before, reports(answers("rollout 0", 10, ticks=101), calls=PLAY))  # one token of a long answer
    assert progresses(before, reports(answers("rollout 0", 10, ticks=100), calls=PLAY, ticks=4))
    assert not progresses(reports(silent("policy 0", 10)), reports(answers("policy 0", 10)))  # nothing to compare


def test_disk_traffic_is_progress() -> None:
    def writes(size: int) -> Reports:
        return reports(WorkerReport("policy 0", "the policy 0", 10, Report(7, disk_bytes=size)), calls=UPDATE)

    assert not progresses(writes(5_000), writes(9_000)) and progresses(writes(9_000), writes(9_000_000))


def test_a_silent_worker_is_named_unless_it_computes() -> None:
    away = reports(answers("policy 0", 10), silent("policy 1", 11, node="node b"), calls=UPDATE)
    assert find(away).verdict.startswith("the policy 1 (pid 11) does not answer")
    assert progresses(*[reports(silent("policy 1", 11, process(11, cpu=cpu)), calls=UPDATE[1:]) for cpu in (1.0, 4.0)])


def test_a_call_has_its_own_timeout() -> None:
    sleeps = [ActiveCall("episode", "", 4, 70, None), ActiveCall("environment.step", "", 2, 65, 600.0)]
    stall = find(reports(answers("rollout 0", 10, calls=sleeps), calls=PLAY))
    assert stall.call_timeout == 600.0
    for fact in ("the rollout 0 (pid 10) waits", "4 x episode (70 s), 2 x environment.step (65 s)"):
        assert fact in stall.verdict


def test_if_all_wait_the_rank_with_the_fewest_counts_is_named() -> None:
    update = [ActiveCall("play", "rollout 0", 4, 90, None), *UPDATE]
    stall = find(
        reports(
            answers("rollout 0", 10), answers("policy 0", 20, ticks=31), answers("policy 1", 21, ticks=30), calls=update
        )
    )
    assert [each.worker for each in stall.culprits] == ["policy 1"]
    assert stall.verdict.startswith("the policy 1 (pid 21) waits, in update (62 s)")


def test_without_awaited_workers_the_controller_is_named() -> None:
    stall = find(reports(answers("policy 0", 10), calls=[ActiveCall("advantage", "", 1, 61, None)]))
    assert stall.verdict.startswith("the controller (pid 1) waits") and "advantage (61 s)" in stall.verdict


class Replay(StallMonitor):
    """A monitor with reports from the test."""

    def __init__(self, collect_reports: Callable[[], Reports], *arguments: Any):
        super().__init__([], *arguments)
        self.collect_reports = collect_reports


def trainer(folder: Path, notice: float, timeout: float | None) -> Any:
    return SimpleNamespace(folder=folder, stall_notice_seconds=notice, stall_timeout=timeout)


class Case:
    """A monitor with notice 60 s and timeout 600 s, with reports from the test."""

    def __init__(self, tmp_path: Path, timeout: float | None = 600.0):
        self.lines: list[str] = []
        self.asked = 0
        self.now: Reports = reports()
        self.monitor = Replay(self.collect_reports, trainer(tmp_path, 60.0, timeout), "cpu", self.lines.append, str)
        self.ended: list[str] = []
        self.monitor._end_run = lambda stall, now: self.ended.append(stall.verdict)  # type: ignore[method-assign]
        self.monitor.check(6.0)

    def collect_reports(self) -> Reports:
        self.asked += 1
        return self.now

    def wait(self, seconds: int) -> None:
        for _ in range(seconds // 6):
            self.monitor.check(6.0)


def test_workers_are_not_asked_while_this_process_makes_progress(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for _ in range(200):
        HEARTBEAT.tick()
        case.monitor.check(6.0)
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


def test_null_never_ends_the_run(tmp_path: Path) -> None:
    case = Case(tmp_path, timeout=None)
    case.now = STOPPED
    case.wait(6000)
    assert len(case.lines) == 1 and "The run ends" not in case.lines[0] and not case.ended


def test_slow_workers_are_progress_and_the_end_of_a_stall_is_reported(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for number in range(1000):  # 100 minutes of computation, then a long answer, token by token
        case.now = reports(answers("policy 0", 10, cpu=number), calls=UPDATE)
        case.monitor.check(6.0)
    for number in range(1000):
        case.now = reports(answers("rollout 0", 10, ticks=number), calls=UPDATE)
        case.monitor.check(6.0)
    assert not case.lines and not case.ended
    case.now = STOPPED
    case.wait(120)
    HEARTBEAT.tick()
    case.wait(6)
    assert [line.split(":")[0].split(",")[0] for line in case.lines] == ["no progress for 60 s", "progress again"]


def test_the_timeout_of_a_call_can_be_longer(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.now = reports(answers("policy 0", 10, calls=[ActiveCall("environment.step", "", 1, 9, 900.0)]), calls=UPDATE)
    case.wait(924)
    assert not case.ended
    case.wait(6)
    assert len(case.ended) == 1


def test_a_failure_of_the_monitor_is_reported_once_and_it_continues(tmp_path: Path) -> None:
    lines: list[str] = []
    results = [ValueError("no text"), ValueError("no text"), reports()]
    done = threading.Event()

    def collect_reports() -> Reports:
        one = results.pop(0)
        if isinstance(one, Exception):
            raise one
        done.set()
        results.append(one)
        return one

    async def wait() -> None:
        async with Replay(collect_reports, trainer(tmp_path, 1.0, None), "cpu", lines.append, str):
            assert await asyncio.to_thread(done.wait, 30)

    asyncio.run(wait())
    failures = [line for line in lines if "stall monitor failed" in line]
    assert len(failures) == 1 and "ValueError: no text" in failures[0]


class StartingRanks:
    """Ranks of which one computes between the first reports and then is idle."""

    def __init__(self, cpu_seconds: list[float]):
        self.cpu_seconds = cpu_seconds

    def collect_reports(self, timeout: float) -> Reports:
        cpu = self.cpu_seconds.pop(0) if len(self.cpu_seconds) > 1 else self.cpu_seconds[0]
        return [answers("policy 0", 10, cpu=cpu)]


def test_a_start_may_take_long_as_long_as_its_workers_compute() -> None:
    ranks: Any = StartingRanks([float(second) for second in range(30)])

    async def start() -> None:
        with HEARTBEAT.record_call("start", "policy 0"):
            async with stall_monitor.limit_idle_start(1.0, [ranks]):
                await asyncio.sleep(60)

    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(start())
    assert ranks.cpu_seconds == [29.0] and time.monotonic() - begin > 3


def run_stalled(tmp_path: Path, lines: list[str], block: Callable[[], Coroutine[Any, Any, None]]) -> RunStalled:
    """Error of a block during which a worker is stopped."""
    alone = reports(silent("policy 1", 11, process(11, True)), calls=UPDATE)

    async def stall() -> None:
        async with Replay(lambda: alone, trainer(tmp_path, 0.1, 0.3), "cpu", lines.append, lambda: "stopped; resume"):
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


def test_the_run_ends_if_its_stacks_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "stalls").write_text("a file in place of the folder")
    error = run_stalled(tmp_path, [], lambda: asyncio.sleep(50))
    assert error.culprits == ["policy 1"] and "could not be written" in str(error)


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
        async with Replay(reports, trainer(tmp_path, 0.1, 0.2), "cpu", print, str):
            raise KeyError("its own")

    with pytest.raises(KeyError):
        asyncio.run(work())


BLOCKED = """
import asyncio, sys, time
from pathlib import Path
from types import SimpleNamespace
from alphaapollo.controller import stall_monitor
stall_monitor.GRACE_SECONDS = 0.2

async def main():
    trainer = SimpleNamespace(folder=Path(sys.argv[1]), stall_notice_seconds=1.0, stall_timeout=2.0)
    async with stall_monitor.StallMonitor([], trainer, "cpu", print, lambda: "stopped"):
        time.sleep(50)

asyncio.run(main())
"""


def test_a_blocked_event_loop_ends_too(tmp_path: Path) -> None:
    command, folder = [sys.executable, "-c", BLOCKED, str(tmp_path)], Path(__file__).parents[3]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: no progress for ") and "the controller (pid " in done.stderr
    (file,) = (tmp_path / "stalls").iterdir()
    assert "in main" in file.read_text() or "main (<string>" in file.read_text()


class Group:
    async def update(self, ranks: LocalRanks[Any]) -> list[Any]:
        return await ranks.call(
            lambda worker: [one.name for one in HEARTBEAT.list_active_calls() if one.worker == "policy 0"]
        )


def test_a_call_has_the_name_of_its_method() -> None:
    assert asyncio.run(Group().update(LocalRanks("worker", "policy"))) == [["update"]]
    assert get_enclosing_method_name(partial(print, "x")) == "call"


def test_a_stopped_required_process_is_reported_during_progress(tmp_path: Path) -> None:
    lines: list[str] = []
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    required = {"Ray's raylet": raylet.pid}
    monitor = Replay(reports, trainer(tmp_path, 60.0, 600.0), "cpu", lines.append, str, required)

    def wait(state: bool) -> None:
        while not (seen := read_process(raylet.pid)) or seen.is_stopped is not state:
            time.sleep(0.01)
        HEARTBEAT.tick()
        monitor.check(6.0)

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
