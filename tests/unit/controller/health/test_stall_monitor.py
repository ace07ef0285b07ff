"""When a stall is told of, and when it ends the run: in made-up time, but for the ends themselves."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.unit.controller.test_stalls import UPDATE, answers, look, process, silent

from alphaapollo.controller.health import stall_monitor
from alphaapollo.controller.health.stall_detector import Look
from alphaapollo.controller.health.stall_monitor import Patience, StallWatch
from alphaapollo.controller.ranks import LocalRanks, Stalled, called
from alphaapollo.utils.heartbeat import PULSE, Doing, read_process

pytestmark = pytest.mark.timeout(60)


class Case:
    """A watch with `stall_notice` 60 and `stall_timeout` 600 that sees what a test gives it."""

    def __init__(self, tmp_path: Path, timeout: float | None = 600.0):
        self.told: list[str] = []
        self.asked = 0
        self.now: Look = look()
        way_on = "stopped; the same command goes on from step_20"
        self.watch = StallWatch(
            [], Patience(60.0, timeout), "cpu", tmp_path, self.told.append, lambda: way_on, self.see
        )
        self.ended: list[str] = []
        self.watch._end = lambda finding, now: self.ended.append(finding.verdict)  # type: ignore[method-assign]
        self.watch.look(6.0)

    def see(self) -> Look:
        self.asked += 1
        return self.now

    def wait(self, seconds: int) -> None:
        for _ in range(seconds // 6):
            self.watch.look(6.0)


STOPPED = look(answers("policy 0", 10), silent("policy 1", 11, process(11, "T")), doing=UPDATE)


def test_nobody_is_asked_while_this_process_gets_on(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for _ in range(200):
        PULSE.beat()
        case.watch.look(6.0)
    assert case.asked == 0 and not case.told


def test_told_once_at_the_notice_and_ended_at_the_timeout(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.now = STOPPED
    case.wait(54)
    assert not case.told
    case.wait(540)
    (line,) = case.told
    assert line.startswith("nothing has moved for 60 s, since ")
    assert "the policy 1 (pid 11) is stopped" in line and "At 600 s the run ends (trainer.stall_timeout)." in line
    assert not case.ended
    case.wait(6)
    assert len(case.ended) == 1


def test_a_look_that_fails_is_told_once_and_the_watch_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    looks = [ValueError("no text"), ValueError("no text"), look()]
    done = threading.Event()

    def see() -> Look:
        one = looks.pop(0)
        if isinstance(one, Exception):
            raise one
        done.set()
        looks.append(one)
        return one

    async def wait() -> None:
        async with StallWatch([], Patience(1.0, None), "cpu", tmp_path, told.append, str, see):
            assert await asyncio.to_thread(done.wait, 30)

    asyncio.run(wait())
    failures = [line for line in told if "failed in a look" in line]
    assert len(failures) == 1 and "ValueError: no text" in failures[0]


def test_null_waits_for_ever(tmp_path: Path) -> None:
    case = Case(tmp_path, timeout=None)
    case.now = STOPPED
    case.wait(6000)
    assert len(case.told) == 1 and "the run ends" not in case.told[0] and not case.ended


def test_slow_is_not_stuck(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for number in range(1000):  # a first step of an hour and a half
        case.now = look(answers("policy 0", 10, cpu=number), doing=UPDATE, at=6.0 * number)
        case.watch.look(6.0)
    (line,) = case.told
    assert "the policy 0 (pid 10) computes" in line and "the run ends" not in line and not case.ended


def test_counts_of_workers_are_movement_and_the_end_of_a_stall_is_told(tmp_path: Path) -> None:
    case = Case(tmp_path)
    for number in range(1000):  # a long answer, token by token
        case.now = look(answers("rollout 0", 10, beats=number), doing=UPDATE)
        case.watch.look(6.0)
    assert not case.told and not case.ended
    case.now = STOPPED
    case.wait(120)
    PULSE.beat()
    case.wait(6)
    assert [line.split(":")[0].split(",")[0] for line in case.told] == ["nothing has moved for 60 s", "it moves again"]


def test_what_has_a_limit_of_its_own_is_given_that(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.now = look(answers("policy 0", 10, doing=[Doing("environment.step", "", 1, 9, 900.0)]), doing=UPDATE)
    case.wait(924)
    assert not case.ended
    case.wait(6)
    assert len(case.ended) == 1


def test_out_of_the_block_comes_who_and_where_the_stacks_are(tmp_path: Path) -> None:
    told: list[str] = []

    async def stand_still() -> None:
        alone = look(silent("policy 1", 11, process(11, "T")), doing=UPDATE)
        see = iter([alone] * 1000).__next__
        async with StallWatch([], Patience(0.1, 0.3), "cpu", tmp_path, told.append, lambda: "stopped; go on", see):
            await asyncio.sleep(50)

    with pytest.raises(Stalled) as caught:
        asyncio.run(stand_still())
    assert caught.value.culprits == ["policy 1"] and told
    (file,) = (tmp_path / "stalls").iterdir()
    assert str(caught.value).endswith(f"for whom, lie in {file}; stopped; go on.")
    assert "=== the policy 1 (pid 11)\n--- process 11\n" in file.read_text()


def test_who_waits_for_something_else_when_told_to_end_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_monitor, "GRACE_SECONDS", 0.5)

    async def stand_still() -> None:
        alone = look(silent("policy 1", 11, process(11, "T")), doing=UPDATE)
        see = iter([alone] * 1000).__next__
        async with StallWatch([], Patience(0.1, 0.3), "cpu", tmp_path, print, str, see):
            try:
                await asyncio.sleep(50)
            finally:
                await asyncio.sleep(50)  # a checkpoint on its way

    with pytest.raises(Stalled):
        asyncio.run(stand_still())


def test_a_block_that_ends_by_itself_is_left_alone(tmp_path: Path) -> None:
    async def work() -> None:
        async with StallWatch([], Patience(0.1, 0.2), "cpu", tmp_path, print, str, lambda: None):
            raise KeyError("its own")

    with pytest.raises(KeyError):
        asyncio.run(work())


BLOCKED = """
import asyncio, sys, time
from pathlib import Path
from alphaapollo.controller import stall_watch
from alphaapollo.controller.health.stall_monitor import Patience, StallWatch
stall_watch.GRACE_SECONDS = 0.2

async def main():
    async with StallWatch([], Patience(1.0, 2.0), "cpu", Path(sys.argv[1]), print, lambda: "stopped"):
        time.sleep(50)

asyncio.run(main())
"""


def test_a_loop_that_is_held_up_ends_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path)],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: nothing has moved for ") and "the controller (pid " in done.stderr
    (file,) = (tmp_path / "stalls").iterdir()
    assert "in main" in file.read_text() or "main (<string>" in file.read_text()


class Group:
    async def update(self, ranks: LocalRanks[Any]) -> list[Any]:
        return await ranks.call(lambda worker: [one.what for one in PULSE.report().doing if one.whom == "str 0"])


def test_a_call_bears_the_name_of_who_makes_it() -> None:
    assert asyncio.run(Group().update(LocalRanks("worker"))) == [["update"]]
    assert called(partial(print, "x")) == "call"


def test_a_needed_process_that_is_stopped_is_told_of_though_the_run_gets_on(tmp_path: Path) -> None:
    told: list[str] = []
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    needed = {"Ray's raylet": raylet.pid}
    watch = StallWatch([], Patience(60.0, 600.0), "cpu", tmp_path, told.append, str, look, needed)

    def wait(state: bool) -> None:
        while not (seen := read_process(raylet.pid)) or seen.stopped is not state:
            time.sleep(0.01)
        for _ in range(20):
            PULSE.beat()
            watch.look(6.0)

    try:
        wait(False)
        assert told == []
        for times in (1, 2):
            raylet.send_signal(signal.SIGSTOP)
            wait(True)
            line = f"Ray's raylet (pid {raylet.pid}) is stopped (SIGSTOP; kill -CONT lets it go on)"
            assert told == [line] * times
            raylet.send_signal(signal.SIGCONT)
            wait(False)
    finally:
        raylet.kill()
        raylet.wait()
