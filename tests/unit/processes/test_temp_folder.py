"""Temporary files are removed with their command; those of a killed command are removed by the next one."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alphaapollo.processes import entry_point
from alphaapollo.processes.entry_point import remove_stale_folders, run_in_temp_folder
from tests.processes import ROOT, start_process


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The machine's temporary folder, for a test."""
    multiprocessing.util.get_temp_dir()  # one per process: outside
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own are too long for sockets
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == folder


def writes(code: int, name: str = "pymp-1") -> Callable[[], int]:
    def command() -> int:
        folder = Path(tempfile.mkdtemp())
        assert folder.parent == Path(os.environ["TMPDIR"]) and folder.parent.name.startswith(entry_point.PREFIX)
        (folder.parent / name).mkdir()
        return code

    return command


def test_the_folder_is_removed_with_the_command(base: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_temp_folder(lambda: 1 // 0)
    for code, name in ((0, "pymp-1"), (2, "pymp-1"), (130, "ray")):
        assert run_in_temp_folder(writes(code, name)) == code
        assert list(base.iterdir()) == []


def test_what_remains_is_removed_by_the_next_command(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_in_temp_folder(writes(1, "ray")) == 1
    (logs,) = base.iterdir()
    assert (logs / "ray").is_dir(), "logs of a failure are kept"
    with monkeypatch.context() as patch:  # a folder that is still written to
        patch.setattr(entry_point, "remove_paths", lambda paths: None)
        run_in_temp_folder(lambda: 0)
    assert len(list(base.iterdir())) == 2
    run_in_temp_folder(writes(0))
    assert list(base.iterdir()) == []


OTHER = """
import os, sys, tempfile, time
from alphaapollo.processes.entry_point import run_in_temp_folder

def command():
    open(tempfile.gettempdir() + "/left", "w").close()
    print("ready", flush=True)
    time.sleep(100)

run_in_temp_folder(command)
"""


def test_folders_of_killed_commands_are_removed_and_those_of_running_ones_kept(base: Path) -> None:
    (base / "alphaapollo-sandbox-x7k2q9lm").mkdir()  # another prefix
    (base / "alphaapollo-tmp-x7k2q9lm.txt").touch()
    (base / "alphaapollo-tmp-x7k2q9lm").touch()  # no folder
    with start_process(sys.executable, "-c", OTHER, env=os.environ | {"PYTHONPATH": str(ROOT)}) as other:
        assert other.stdout and other.stdout.readline() == b"ready\n"
        (folder,) = (path.parent for path in base.glob("*/left"))
        remove_stale_folders(base)
        assert (folder / "left").exists()
    remove_stale_folders(base)
    assert not folder.exists()
    assert sorted(path.name for path in base.iterdir()) == [
        "alphaapollo-sandbox-x7k2q9lm",
        "alphaapollo-tmp-x7k2q9lm",
        "alphaapollo-tmp-x7k2q9lm.txt",
    ]


def test_sockets_with_too_long_paths_stay_outside(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    seen: list[tuple[bool, str | None]] = []

    def command() -> int:
        seen.append((os.environ["TMPDIR"].startswith(f"{base}/"), os.environ.get("RAY_TMPDIR")))
        multiprocessing.get_context("spawn").Manager().shutdown()  # listens on a socket
        return 0

    for sockets, of_ray in ((100, 100), (100, len(str(base))), (100, 1), (1, 100)):
        monkeypatch.setattr(entry_point, "MAX_PATH", sockets)
        monkeypatch.setattr(entry_point, "MAX_RAY_PATH", of_ray)
        run_in_temp_folder(command)
    assert seen == [(True, None), (True, str(base)), (True, "/tmp"), (False, None)]
    assert "RAY_TMPDIR" not in os.environ and list(base.iterdir()) == []
