"""What the zygote watches, and what it survives."""

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


def test_a_session_does_not_compute_between_its_snippets(sandbox: Sandbox) -> None:
    """It reports its end to be free of its deadline."""
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
    for _ in range(2):  # what a snippet itself uses does not count
        busy = "import time\nwhile time.process_time() - start < 1.5: pass"
        assert sandbox.run(f"import time\nstart = time.process_time()\n{busy}", session="f").status == "ok"
    assert not sandbox.run("pass", session="f").restarted
    sandbox.end_session("f")


def test_a_session_that_takes_no_orders_ends_no_other_run() -> None:
    stubborn = "import os, time\nwhile True:\n    os.write(3, b'D\\0')\n    time.sleep(0.001)"
    with Sandbox(max_concurrent=2) as sandbox:
        supervisor = sandbox.start()._supervisor
        assert supervisor is not None
        sandbox.run(stubborn, session="g", timeout=2)
        for _ in range(500):  # more than its socket holds
            sandbox.run("pass", session="g", timeout=0.5)
        assert not supervisor.failure
        assert sandbox.run("print(1)").stdout == "1\n"


def test_a_name_that_is_no_text_ends_no_run() -> None:
    named = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff) R 1', 0, 0, 0)\ntime.sleep(1)\nprint('named')"
    with Sandbox(max_concurrent=2) as sandbox:
        supervisor = sandbox.start()._supervisor
        assert supervisor is not None
        assert sandbox.run(named).stdout == "named\n"
        assert not supervisor.failure


def test_many_threads_work_as_long_as_they_are_not_too_many(sandbox: Sandbox) -> None:
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


def test_a_handler_of_alarms_prints_nothing_of_ours(sandbox: Sandbox) -> None:
    code = "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('alarm'))\nsignal.setitimer(0, 0.01)\n"
    result = sandbox.run(code + "signal.pause()")
    assert (result.stdout, result.stderr) == ("alarm\n", "")


@pytest.mark.parametrize("name", ["mkdir", "fork"])
def test_a_run_that_cannot_be_started_fails_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
