"""One process per folder; the lock of a dead process is free."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alphaapollo.processes import folder_lock
from alphaapollo.processes.folder_lock import FolderInUseError, lock_folder
from tests.processes import start_process

HOLD = """
import os, sys, time
from pathlib import Path
from alphaapollo.processes.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    if os.fork() == 0:
        os.close(1)
        time.sleep(60)  # a child that outlives it
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    with start_process(sys.executable, "-c", HOLD, str(folder), text=True, process_group=0) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        yield holder
        os.killpg(holder.pid, signal.SIGKILL)


def test_another_process_is_named_and_the_lock_of_a_dead_one_is_free(tmp_path: Path) -> None:
    folder = tmp_path / "project" / "run"
    with held_by_another_process(folder) as holder:
        with pytest.raises(FolderInUseError, match=f"process {holder.pid} on ") as error:
            lock_folder(folder).__enter__()
        assert "\n" not in str(error.value)
        assert not folder.exists(), "the folder itself is not touched"
        holder.kill()
        holder.wait()
        assert (folder.parent / ".run.lock").exists()
        with lock_folder(folder):
            assert json.loads((folder.parent / ".run.lock").read_text())["pid"] == os.getpid()
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize(("taken", "other"), [("p/x", "p/y"), ("p/y", "p/x"), ("p/y", "p/y"), ("q/x", "p/x")])
def test_links_to_a_folder_are_locked_as_well(tmp_path: Path, taken: str, other: str) -> None:
    (tmp_path / "p" / "x").mkdir(parents=True)
    (tmp_path / "p" / "y").symlink_to("x")
    (tmp_path / "q").symlink_to("p")
    with (
        held_by_another_process(tmp_path / taken) as holder,
        pytest.raises(FolderInUseError, match=f"process {holder.pid} on "),
    ):
        lock_folder(tmp_path / other).__enter__()
    with lock_folder(tmp_path / other), lock_folder(tmp_path / "another"):
        pass


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(next(iter(folder_lock.UNSUPPORTED)), "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    with lock_folder(tmp_path / "run"):
        assert "without locks" in capsys.readouterr().err
