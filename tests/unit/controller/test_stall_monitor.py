"""Which worker is named if a run stalls, when a stall is reported, and when it ends the run."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller import stall_monitor
from alphaapollo.controller.errors import RunStalled
from alphaapollo.controller.ranks import LocalRanks, get_enclosing_method_name
from alphaapollo.controller.stall_monitor import StallMonitor, StartLimits, find_stall
from alphaapollo.utils.heartbeat import HEARTBEAT, ActiveCall, ProcessStatus, Report, read_process
from tests.processes import run_python, start_process, wait_until

Reports = list[Report]
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
) -> Report:
    report = Report(ticks, tuple(calls), (process(pid, cpu=cpu), *more))
    return replace(report, worker=key, name=f"the {key} (pid {pid})")


def silent(key: str, pid: int, status: ProcessStatus | None = None, node: str = "") -> Report:
    processes = (status,) if status else ()
    return Report(None, processes=processes, worker=key, name=f"the {key} (pid {pid})", node=node)


def reports(*workers: Report, calls: Sequence[ActiveCall] = (), ticks: int = 3, cpu: float = 1.0) -> Reports:
    return [answers("controller", 1, calls=calls, ticks=ticks, cpu=cpu), *workers]


STOPPED = reports(answers("policy 0", 10), silent("policy 1", 11, process(11, True)), calls=UPDATE)
UPDATE_CALLS = ["update of policy 0 (62 s), update of policy 1 (62 s)"]
CORE = process(21, True, name="the engine core of rollout worker 1")
STOPPED_CORE = reports(answers("rollout 0", 10), answers("rollout 1", 20, CORE), calls=PLAY)
RAYLET = process(71, True, name="Ray's raylet")
STOPPED_RAYLET = [answers("controller", 1, RAYLET, calls=UPDATE), answers("policy 0", 10), answers("policy 1", 11)]
ELSEWHERE = reports(answers("policy 0", 10), silent("policy 1", 11, node="node b"), calls=UPDATE)
SLEEPS = [ActiveCall("episode", "", 4, 70, None), ActiveCall("environment.step", "", 2, 65, 600.0)]
SLEEPING = reports(answers("rollout 0", 10, calls=SLEEPS), calls=PLAY)
RANKS = answers("rollout 0", 10), answers("policy 0", 20, ticks=31), answers("policy 1", 21, ticks=30)
BEHIND = reports(*RANKS, calls=[ActiveCall("play", "rollout 0", 4, 90, None), *UPDATE])
ALONE = reports(answers("policy 0", 10), calls=[ActiveCall("advantage", "", 1, 61, None)])


@pytest.mark.parametrize(
    ("now", "culprits", "start", "facts"),
    [
        (STOPPED, ["policy 1"], "the policy 1 (pid 11) is stopped", ["-CONT", "in update", *UPDATE_CALLS]),
        (STOPPED_CORE, ["rollout 1"], "the engine core of rollout worker 1 (pid 21) is stopped", []),
        (STOPPED_RAYLET, ["controller"], "Ray's raylet (pid 71) is stopped", []),
        (ELSEWHERE, ["policy 1"], "the policy 1 (pid 11) does not answer", []),
        (SLEEPING, ["rollout 0"], "the rollout 0 (pid 10) waits", ["4 x episode (70 s), 2 x environment.step (65 s)"]),
        (BEHIND, ["policy 1"], "the policy 1 (pid 21) waits, in update (62 s)", []),  # it has the fewest counts
        (ALONE, ["controller"], "the controller (pid 1) waits", ["advantage (61 s)"]),  # it waits for no worker
    ],
)
def test_the_blocking_worker_is_named(now: Reports, culprits: list[str], start: str, facts: list[str]) -> None:
    stall = find_stall(now, now, 6.0, "cpu")
    assert stall and list(stall.culprits) == culprits
    assert stall.verdict.startswith(start)
    assert [fact for fact in facts if fact not in stall.verdict] == [], stall.verdict
    assert stall.call_timeout == (600.0 if now is SLEEPING else 0.0)


def compute(cpu: float) -> Reports:
    return reports(answers("policy 0", 10, cpu=cpu), answers("policy 1", 11), calls=UPDATE)


def compute_stopped(cpu: float) -> Reports:
    return reports(answers("policy 0", 10, cpu=cpu), silent("policy 1", 11, process(11, True)), calls=UPDATE)


def compute_silently(cpu: float) -> Reports:
    return reports(silent("policy 1", 11, process(11, cpu=cpu)), calls=UPDATE[1:])


def grade(cpu: float) -> Reports:
    return reports(answers("rollout 0", 10, process(12, cpu=cpu, required=False)), calls=PLAY)


def count(worker: int, controller: int = 3) -> Reports:
    return reports(answers("rollout 0", 10, ticks=worker), calls=PLAY, ticks=controller)


def write(disk_bytes: int) -> Reports:
    return reports(Report(7, disk_bytes=disk_bytes, worker="policy 0", name="the policy 0"), calls=UPDATE)


@pytest.mark.parametrize(
    ("before", "now", "on_cpu", "on_cuda"),
    [
        (compute(5.0), compute(5.6), True, False),  # a tenth of a core: the machine is busy
        (compute(5.0), compute(5.1), False, False),  # waiting processes wake up now and then
        (compute_stopped(0.0), compute_stopped(6.0), False, False),  # a rank spins in a collective
        (grade(0.0), grade(6.0), True, True),  # a grader does not wait for a GPU,
        (reports(), reports(cpu=4.0), True, True),  # nor a controller that waits for no worker
        (compute_silently(1.0), compute_silently(4.0), True, False),
        (count(100), count(101), True, True),  # one token of a long answer
        (count(100), count(100, controller=4), True, True),
        (reports(silent("policy 0", 10)), reports(answers("policy 0", 10)), False, False),  # nothing to compare
        (write(5_000), write(9_000), False, False),
        (write(9_000), write(9_000_000), True, True),
    ],
)
def test_progress_is_cpu_time_without_gpus_counts_and_disk_traffic(
    before: Reports, now: Reports, on_cpu: bool, on_cuda: bool
) -> None:
    assert (find_stall(before, now, 6.0, "cpu") is None) is on_cpu
    assert (find_stall(before, now, 6.0, "cuda") is None) is on_cuda


@pytest.fixture(autouse=True)
def check_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_monitor, "SHORTEST_TICK", 0.02)


class Replay(StallMonitor):
    """A monitor with reports from the test."""

    def __init__(self, collect_reports: Callable[[], Reports], *arguments: Any):
        super().__init__([], *arguments)
        self._collect_reports = lambda with_stacks=False: collect_reports()


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
        self.monitor._end_stalled_run = lambda stall: self.ended.append(stall.verdict)  # type: ignore[method-assign]
        self.monitor.check(6.0)

    def collect_reports(self) -> Reports:
        self.asked += 1
        return self.now

    def wait(self, seconds: int) -> None:
        for _ in range(seconds // 6):
            self.monitor.check(6.0)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


@pytest.mark.parametrize("timeout", [600.0, None])
def test_a_stall_is_reported_once_and_ends_the_run_at_the_timeout(tmp_path: Path, timeout: float | None) -> None:
    case = Case(tmp_path, timeout)
    case.now = STOPPED
    case.wait(54)
    assert not case.lines
    case.wait(540)
    (line,) = case.lines
    assert line.startswith("no progress for 60 s, since ") and "the policy 1 (pid 11) is stopped" in line
    assert ("The run ends" in line) == ("600 s (trainer.stall_timeout)" in line) == (timeout is not None)
    assert not case.ended
    case.wait(6)
    assert len(case.ended) == (0 if timeout is None else 1)
    case.wait(6000)
    assert len(case.lines) == 1


def test_slow_workers_are_progress_and_the_end_of_a_stall_is_reported(case: Case) -> None:
    for _ in range(200):
        HEARTBEAT.tick()
        case.monitor.check(6.0)
    assert case.asked == 0, "workers are not asked while this process makes progress"
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


def test_the_timeout_of_a_call_can_be_longer(case: Case) -> None:
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
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        done.set()
        results.append(result)
        return result

    async def wait() -> None:
        async with Replay(collect_reports, trainer(tmp_path, 1.0, None), "cpu", lines.append, str):
            assert await asyncio.to_thread(done.wait, 30)

    asyncio.run(wait())
    failures = [line for line in lines if "stall monitor failed" in line]
    assert len(failures) == 1 and "ValueError: no text" in failures[0]


def test_a_start_may_take_long_as_long_as_its_workers_compute(tmp_path: Path) -> None:
    """A worker computes between the first reports, and then is idle."""
    cpu_seconds = [float(second) for second in range(20)]

    def collect_reports() -> Reports:
        cpu = cpu_seconds.pop(0) if len(cpu_seconds) > 1 else cpu_seconds[0]
        return reports(answers("policy 0", 10, cpu=cpu), calls=[ActiveCall("start", "policy 0", 1, 9, None)])

    async def start() -> None:
        async with Replay(collect_reports, StartLimits(0.5, 0.5), "cpu", list[str]().append, str):
            await asyncio.sleep(60)

    begin = time.monotonic()
    with pytest.raises(RunStalled, match="the policy 0"):
        asyncio.run(start())
    assert cpu_seconds == [19.0] and time.monotonic() - begin > 1.2
    assert not list(tmp_path.iterdir())


def run_stalled(tmp_path: Path, lines: list[str], block: Callable[[], Coroutine[Any, Any, None]]) -> RunStalled:
    """Error of a block during which a worker is stopped."""
    alone = reports(silent("policy 1", 11, process(11, True)), calls=UPDATE)

    async def stall() -> None:
        async with Replay(lambda: alone, trainer(tmp_path, 0.1, 0.3), "cpu", lines.append, lambda: "stopped; resume"):
            await block()

    with pytest.raises(RunStalled) as caught:
        asyncio.run(stall())
    return caught.value


@pytest.mark.parametrize("writable", [True, False])
def test_error_names_the_blocking_process_and_its_stacks(tmp_path: Path, writable: bool) -> None:
    stalls, lines = tmp_path / "stalls", list[str]()
    if not writable:
        stalls.write_text("a file in place of the folder")
    error = run_stalled(tmp_path, lines, lambda: asyncio.sleep(50))
    assert error.culprits == ["policy 1"] and lines
    if writable:
        (file,) = stalls.iterdir()
        assert f"{file}; stopped; resume" in str(error)
        assert "=== the policy 1 (pid 11)\n--- process 11\n" in file.read_text()
    else:
        assert "could not be written" in str(error)


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
stall_monitor.GRACE_SECONDS = stall_monitor.SHORTEST_TICK = 0.1

async def main():
    trainer = SimpleNamespace(folder=Path(sys.argv[1]), stall_notice_seconds=0.2, stall_timeout=0.4)
    async with stall_monitor.StallMonitor([], trainer, "cpu", print, lambda: "stopped"):
        time.sleep(50)

asyncio.run(main())
"""


def test_a_blocked_event_loop_ends_too(tmp_path: Path) -> None:
    done = run_python("-c", BLOCKED, str(tmp_path))
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: no progress for ") and "the controller (pid " in done.stderr
    (file,) = (tmp_path / "stalls").iterdir()
    assert "in main" in file.read_text() or "main (<string>" in file.read_text()


class Group:
    async def update(self, ranks: LocalRanks[Any]) -> list[Any]:
        return await ranks.call(
            lambda worker: [call.name for call in HEARTBEAT.list_active_calls() if call.worker == "policy 0"]
        )


def test_a_call_has_the_name_of_its_method() -> None:
    assert asyncio.run(Group().update(LocalRanks("worker", "policy"))) == [["update"]]
    assert get_enclosing_method_name(partial(print, "x")) == "call"


def test_a_stopped_required_process_is_reported_during_progress(tmp_path: Path) -> None:
    lines: list[str] = []
    with start_process() as raylet:
        required = {"Ray's raylet": raylet.pid}
        monitor = Replay(reports, trainer(tmp_path, 60.0, 600.0), "cpu", lines.append, str, required)

        def is_stopped() -> bool:
            return (seen := read_process(raylet.pid)) is not None and seen.is_stopped

        def check() -> int:
            HEARTBEAT.tick()
            monitor.check_required_processes()
            monitor.check(6.0)
            return len(lines)

        assert check() == 0
        for times in (1, 2):
            raylet.send_signal(signal.SIGSTOP)
            assert wait_until(is_stopped) and check() == times
            assert f"Ray's raylet (pid {raylet.pid}) is stopped" in lines[-1]
            raylet.send_signal(signal.SIGCONT)
            assert wait_until(lambda: not is_stopped()) and check() == times
