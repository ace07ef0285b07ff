from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.utils.heartbeat import dump_stacks


def test_this_process_has_stacks_without_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    text = dump_stacks([os.getpid(), 1])
    assert "test_this_process_has_stacks_without_py_spy" in text
    assert "--- process 1\nno stack: py-spy" in text and "test_stack_dumps.py" in text


def test_missing_permission_of_py_spy_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho Permission denied >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "py-spy failed: Permission denied" in dump_stacks([1])


def test_py_spy_sees_into_a_process_that_is_stopped() -> None:
    if "no stack" in dump_stacks([os.getpid()]) or not Path(sys.executable).with_name("py-spy").exists():
        pytest.skip("needs py-spy, and the right to trace")
    script = "def waits():\n    print(flush=True)\n    input()\nwaits()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        assert "waits (<string>:" in dump_stacks([child.pid])
    finally:
        child.kill()
        child.communicate()
