from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from alphaapollo.utils.heartbeat import ActiveCall, Heartbeat, list_descendants, read_process


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
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 30
        while not (found := list_descendants(child.pid)) or read_process(found[0]).name != "timeit":  # type: ignore[union-attr]
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(found[0], signal.SIGSTOP)
        while not (process := read_process(found[0], is_required=False)).is_stopped:  # type: ignore[union-attr]
            assert time.monotonic() < end
            time.sleep(0.01)
        assert process is not None and process.name == "timeit" and not process.is_required
        assert found[0] in list_descendants(os.getpid())
        os.kill(found[0], signal.SIGKILL)
    finally:
        child.kill()
        child.communicate()
    assert read_process(child.pid) is None


def test_a_process_name_may_have_any_bytes() -> None:
    code = "open('/proc/self/comm', 'wb').write(b'\\xff) R 1 (\\xc3'); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        comm, end = Path(f"/proc/{child.pid}/comm"), time.monotonic() + 30
        while b"\xff" not in comm.read_bytes():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert child.pid in list_descendants(os.getpid())
        assert child.pid in [process.pid for process in Heartbeat().make_report().processes]
    finally:
        child.kill()
        child.communicate()
