from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from alphaapollo.utils.heartbeat import Doing, Pulse, descendants, read_process


def test_blocks_of_one_kind_are_told_together_and_each_is_two_beats() -> None:
    now = [100.0]
    pulse = Pulse(lambda: now[0])
    with pulse.doing("update", "policy 1"):
        now[0] = 103.0
        with pulse.doing("grade", limit=10.0), pulse.doing("grade", limit=20.0):
            now[0] = 105.0
            assert pulse.report().doing == (
                Doing("update", "policy 1", 1, 5.0, None),
                Doing("grade", "", 2, 2.0, 20.0),
            )
    assert pulse.report().doing == () and pulse.beats == 6
    pulse.beat()
    assert pulse.report().beats == 7


def test_what_others_count_and_who_helps() -> None:
    pulse, tokens = Pulse(), [5]
    pulse.watch(lambda: tokens[0], lambda: {os.getppid(): "the engine core"})
    before = pulse.beats
    tokens[0] = 9
    own, core, *_ = pulse.report().processes
    assert pulse.beats - before == 4
    assert (own.pid, own.needed, core.pid, core.name, core.needed) == (
        os.getpid(),
        True,
        os.getppid(),
        "the engine core",
        True,
    )


def test_a_stopped_grandchild_is_seen_and_named_by_its_command() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'timeit', '-n', '1', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 30
        while not (found := descendants(child.pid)) or read_process(found[0]).name != "timeit":  # type: ignore[union-attr]
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(found[0], signal.SIGSTOP)
        while not (seen := read_process(found[0], needed=False)).stopped:  # type: ignore[union-attr]
            assert time.monotonic() < end
            time.sleep(0.01)
        assert seen is not None and seen.name == "timeit" and not seen.needed
        assert found[0] in descendants(os.getpid())
        os.kill(found[0], signal.SIGKILL)
    finally:
        child.kill()
        child.communicate()
    assert read_process(child.pid) is None


def test_a_name_that_is_no_text_is_one_like_others() -> None:
    code = "open('/proc/self/comm', 'wb').write(b'\\xff) R 1 (\\xc3'); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        comm, end = Path(f"/proc/{child.pid}/comm"), time.monotonic() + 30
        while b"\xff" not in comm.read_bytes():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert child.pid in descendants(os.getpid())
        assert child.pid in [process.pid for process in Pulse().report().processes]
    finally:
        child.kill()
        child.communicate()
