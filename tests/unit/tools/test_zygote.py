"""Limits that the zygote enforces, and failures that it survives."""

from __future__ import annotations

import contextlib
import os

import psutil
import pytest

from alphaapollo.tools.sandbox import SnippetSandbox
from alphaapollo.tools.sandbox.zygote import SUSPENDED_BYTES
from tests.processes import wait_until


def test_session_does_not_compute_between_snippets(sandbox: SnippetSandbox) -> None:
    """The snippet reports its end to avoid its time limit."""
    count = "x = 0\ndef count():\n    global x\n    while True: x += 1\n"
    thread = "import threading\nthreading.Thread(target=count, daemon=True).start()\n"
    for session, code in (("f", "import os\nos.write(3, b'D\\0')\ncount()"), ("left thread", thread)):
        assert sandbox.run(count + code, session=session, timeout=5).status == "ok"
        assert wait_until(lambda: len(stopped_children(sandbox)) == 1)
        sandbox.end_session(session)
        assert wait_until(lambda: not stopped_children(sandbox))


def stopped_children(sandbox: SnippetSandbox) -> list[str]:
    """Processes of this machine that were stopped in the sandbox."""
    assert sandbox._zygote is not None
    found = []
    for process in psutil.Process(sandbox._zygote.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(str(process.pid))
    return found


def test_session_continues_its_threads(sandbox: SnippetSandbox) -> None:
    code = "import threading, time\ndone = threading.Event()\nthreading.Timer(0.2, done.set).start()"
    assert sandbox.run(code, session="g").status == "ok"
    after = sandbox.run("print(done.wait(10))", session="g")
    assert (after.stdout, after.restarted) == ("True\n", False)
    sandbox.end_session("g")


MANY_FILES = """
import itertools, os
for folder in itertools.count():
    os.mkdir(str(folder), 0o300)
    for number in range(1000):
        open(f"{folder}/{number}", "w").close()
"""


def test_a_snippet_cannot_make_many_files(sandbox: SnippetSandbox) -> None:
    result = sandbox.run(MANY_FILES, timeout=30)
    assert result.status == "error" and "10000 files" in result.reason, result
    assert sandbox.run("open('one', 'w').close()").status == "ok"


@pytest.mark.skipif((os.cpu_count() or 1) > 4, reason="needs too much memory on a machine with more CPUs")
def test_suspended_sessions_share_a_limit_of_memory(sandbox: SnippetSandbox) -> None:
    names = [f"s{number}" for number in range(SUSPENDED_BYTES // (400 << 20) + 2)]
    for name in names:
        assert sandbox.run("x = bytearray(400 << 20)", session=name).status == "ok"
    found = [sandbox.run("'x' in globals()", session=name, echo=True) for name in reversed(names)]
    for name in names:
        sandbox.end_session(name)
    is_kept = [result.stdout == "True\n" for result in found]
    assert is_kept[:2] == [True, True] and not is_kept[-1], "the oldest sessions end first"
    assert [result.restarted for result in found] == [not kept for kept in is_kept]
