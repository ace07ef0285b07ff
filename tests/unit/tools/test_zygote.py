"""Limits that the zygote enforces, and failures that it survives."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaapollo.tools.sandbox import Sandbox, child
from alphaapollo.tools.sandbox.zygote import Zygote


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(max_concurrent=4) as sandbox:
        yield sandbox


def test_session_may_not_compute_between_snippets(sandbox: Sandbox) -> None:
    """The snippet reports its end to avoid its time limit."""
    early = sandbox.run("x = 1\nimport os\nos.write(3, b'D\\0')\nwhile True: pass", session="f", timeout=2)
    assert early.status == "ok"
    supervisor = sandbox.start()._supervisor
    assert supervisor is not None
    end = time.monotonic() + 30
    while "f" in supervisor._sessions and time.monotonic() < end:
        time.sleep(0.05)
    assert "f" not in supervisor._sessions
    after = sandbox.run("x", session="f")
    assert after.restarted and "NameError" in after.stderr
    for _ in range(2):  # CPU time of a snippet does not count
        busy = "import time\nwhile time.process_time() - start < 1.5: pass"
        assert sandbox.run(f"import time\nstart = time.process_time()\n{busy}", session="f").status == "ok"
    assert not sandbox.run("pass", session="f").restarted
    sandbox.end_session("f")


def test_unresponsive_session_does_not_affect_other_runs() -> None:
    stubborn = "import os, time\nwhile True:\n    os.write(3, b'D\\0')\n    time.sleep(0.001)"
    with Sandbox(max_concurrent=2) as sandbox:
        supervisor = sandbox.start()._supervisor
        assert supervisor is not None
        sandbox.run(stubborn, session="g", timeout=2)
        for _ in range(500):  # more than its socket buffers
            sandbox.run("pass", session="g", timeout=0.5)
        assert not supervisor.failure
        assert sandbox.run("print(1)").stdout == "1\n"


def test_process_name_with_invalid_utf8() -> None:
    named = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff) R 1', 0, 0, 0)\ntime.sleep(1)\nprint('named')"
    with Sandbox(max_concurrent=2) as sandbox:
        supervisor = sandbox.start()._supervisor
        assert supervisor is not None
        assert sandbox.run(named).stdout == "named\n"
        assert not supervisor.failure


def test_threads_below_the_limit_work(sandbox: Sandbox) -> None:
    code = """
import threading
threading.stack_size(1 << 18)
end = threading.Event()
threads = [threading.Thread(target=end.wait) for _ in range(200)]
for thread in threads: thread.start()
print(threading.active_count())
end.set()
"""
    assert sandbox.run(code).stdout == "201\n"


def test_alarm_handler_prints_only_its_own_output(sandbox: Sandbox) -> None:
    code = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('alarm'))\nsignal.setitimer(0, 0.01)\n"
    result = sandbox.run(code + "signal.pause()")
    assert (result.stdout, result.stderr) == ("alarm\n", "")


@pytest.mark.parametrize("name", ["mkdir", "fork"])
def test_failed_fork_fails_only_its_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = os.open(os.devnull, os.O_RDWR)

    def broken(*arguments: object) -> None:
        raise OSError(errno.EAGAIN, "no more to be had")

    spec = child.ChildSpec(7, [], 1024, 10, False)
    with ours, theirs, monkeypatch.context() as patch:
        zygote = Zygote(theirs, child.ForkContext(os.getpid(), 0, "", 0, []), str(tmp_path))
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        patch.setattr(os, name, broken)
        socket.send_fds(ours, [json.dumps(dataclasses.asdict(spec)).encode()], [null])
        assert zygote._handle_message()
        notice = json.loads(ours.recv(4096))
    os.close(null)
    assert notice["exit"] == 7 and "no more to be had" in notice["stop_reason"]
    assert not list(tmp_path.iterdir())
