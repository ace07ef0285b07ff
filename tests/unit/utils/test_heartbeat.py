"""Reports of a process about its calls, its helper processes and its stacks."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from alphaapollo.utils.heartbeat import (
    ActiveCall,
    Heartbeat,
    ProcessStatus,
    dump_stacks,
    list_descendants,
    read_process,
)
from tests.processes import start_process, wait_until


def test_calls_of_one_name_are_merged_and_each_counts_twice() -> None:
    now = [100.0]
    heartbeat = Heartbeat(lambda: now[0])
    with heartbeat.record_call("update", "policy 1"):
        now[0] = 103.0
        with heartbeat.record_call("grade", timeout=10.0), heartbeat.record_call("grade", timeout=20.0):
            now[0] = 105.0
            assert heartbeat.make_report().calls == (
                ActiveCall("update", "policy 1", 1, 5.0, None),
                ActiveCall("grade", "", 2, 2.0, 20.0),
            )
    assert heartbeat.make_report().calls == () and heartbeat.ticks == 6
    heartbeat.tick()
    assert heartbeat.make_report().ticks == 7


def test_other_counts_and_helper_processes_are_included() -> None:
    heartbeat, tokens = Heartbeat(), [5]
    heartbeat.watch_helper_processes(lambda: tokens[0], lambda: {os.getppid(): "the engine core"})
    before = heartbeat.ticks
    tokens[0] = 9
    own, core, *_ = heartbeat.make_report().processes
    assert heartbeat.ticks - before == 4
    assert (own.pid, own.is_required) == (os.getpid(), True)
    assert (core.pid, core.name, core.is_required) == (os.getppid(), "the engine core", True)


def test_a_stopped_grandchild_is_found_and_named_by_its_command() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'timeit', '-n', '1', 'input()'])"

    def find_timeit(parent: int) -> ProcessStatus | None:
        found = [read_process(pid, is_required=False) for pid in list_descendants(parent)]
        return next((one for one in found if one and one.name == "timeit"), None)

    with start_process(sys.executable, "-c", script) as child:
        assert wait_until(lambda: find_timeit(child.pid) is not None)
        process = find_timeit(child.pid)
        assert process and not process.is_required and process.pid in list_descendants(os.getpid())
        os.kill(process.pid, signal.SIGSTOP)
        assert wait_until(lambda: (now := read_process(process.pid)) is not None and now.is_stopped)
        os.kill(process.pid, signal.SIGKILL)
    assert read_process(child.pid) is None


def test_a_process_name_may_have_any_bytes() -> None:
    code = "open('/proc/self/comm', 'wb').write(b'\\xff) R 1 (\\xc3'); input()"
    with start_process(sys.executable, "-c", code) as child:
        assert wait_until(lambda: b"\xff" in Path(f"/proc/{child.pid}/comm").read_bytes())
        assert child.pid in list_descendants(os.getpid())
        assert child.pid in [process.pid for process in Heartbeat().make_report().processes]


def test_this_process_has_stacks_without_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    text = dump_stacks([os.getpid(), 1])
    assert "test_this_process_has_stacks_without_py_spy" in text
    assert "--- process 1\nno stack: py-spy" in text and "test_heartbeat.py" in text


def test_py_spy_sees_into_a_process_that_is_stopped() -> None:
    script = "def waits():\n    print(flush=True)\n    input()\nwaits()"
    with start_process(sys.executable, "-c", script) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        text = dump_stacks([child.pid])
    if "no stack" in text:
        pytest.skip("needs py-spy, and the right to trace")
    assert "waits (<string>:" in text
