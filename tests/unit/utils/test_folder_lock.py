"""One driver a folder, and what is left of a dead one is no obstacle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.utils import folder_lock
from alphaapollo.utils.folder_lock import FolderInUseError, lone_driver, refuse_in_use

HOLD = """
import os, sys, time
from pathlib import Path
from alphaapollo.utils.folder_lock import lone_driver
with lone_driver(Path(sys.argv[1])):
    if os.fork() == 0:
        os.close(1)
        time.sleep(60)  # a child that outlives it
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.timeout(60)
def test_another_process_is_named_and_a_dead_one_is_seen_through(tmp_path: Path) -> None:
    folder = tmp_path / "project" / "run"
    command = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=f"process {holder.pid} on .*Wait for it") as error:
            lone_driver(folder).__enter__()
        assert "\n" not in str(error.value)
        with pytest.raises(FolderInUseError, match=f"process {holder.pid} on "):
            refuse_in_use(folder)
        assert not folder.exists(), "the folder itself is not touched"
        holder.kill()
        holder.wait()
        assert (folder.parent / ".run.lock").exists()
        with lone_driver(folder):
            assert json.loads((folder.parent / ".run.lock").read_text())["pid"] == os.getpid()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
    assert list(folder.parent.iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("taken", "other"), [("p/x", "p/y"), ("p/y", "p/x"), ("p/y", "p/y"), ("q/x", "p/x")])
def test_a_folder_has_one_driver_whatever_it_is_called(tmp_path: Path, taken: str, other: str) -> None:
    (tmp_path / "p" / "x").mkdir(parents=True)
    (tmp_path / "p" / "y").symlink_to("x")
    (tmp_path / "q").symlink_to("p")
    command = [sys.executable, "-c", HOLD, str(tmp_path / taken)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=f"process {holder.pid} on "), lone_driver(tmp_path / other):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
    with lone_driver(tmp_path / other):
        pass


def test_who_only_looks_leaves_nothing_and_holds_nothing(tmp_path: Path) -> None:
    refuse_in_use(tmp_path / "run")
    assert not [*tmp_path.iterdir()]
    (tmp_path / ".run.lock").touch()  # of a dead one
    refuse_in_use(tmp_path / "run")
    with lone_driver(tmp_path / "run"):
        pass


def test_others_names_are_free(tmp_path: Path) -> None:
    with lone_driver(tmp_path / "one"), lone_driver(tmp_path / "two"):
        pass


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lockf(descriptor: int, operation: int) -> None:
        raise OSError(next(iter(folder_lock.NO_LOCKS)), "no locks")

    monkeypatch.setattr("fcntl.lockf", lockf)
    with lone_driver(tmp_path / "run"):
        assert "without locks" in capsys.readouterr().err
