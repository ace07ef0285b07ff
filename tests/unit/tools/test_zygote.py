"""Limits that the zygote enforces, and failures that it survives."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
import pytest

from alphaapollo.tools.sandbox import SnippetSandbox
from alphaapollo.tools.sandbox.zygote import SUSPENDED_BYTES, has_more_files, remove_tree
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


def test_unresponsive_session_does_not_affect_other_runs(sandbox: SnippetSandbox) -> None:
    stubborn = "import os, time\nwhile True:\n    os.write(3, b'D\\0')\n    time.sleep(0.001)"
    zygote = sandbox._zygote
    sandbox.run(stubborn, session="g", timeout=2)
    for _ in range(500):  # more than its socket buffers
        sandbox.run("pass", session="g", timeout=0.5)
    assert sandbox.run("print(1)").stdout == "1\n"
    assert sandbox._zygote is zygote is not None and not zygote.has_ended
    sandbox.end_session("g")


MANY_FILES = """
import itertools, os
for folder in itertools.count():
    os.mkdir(str(folder), 0o300)
    for number in range(1000):
        open(f"{folder}/{number}", "w").close()
"""


def test_a_folder_that_is_too_deep_to_be_counted_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(20):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)  # not by an absolute path, which may have at most PATH_MAX bytes
    assert has_more_files(str(tmp_path), 1000)
    os.chdir(tmp_path)
    remove_tree(str(tmp_path))


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
