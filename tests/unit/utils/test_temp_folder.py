"""A command's temporary files go with it; those of a dead one go when the next begins, those of a living one never."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import alphaapollo
from alphaapollo.utils import temp_folder
from alphaapollo.utils.temp_folder import goes_with_it, in_own_folder, sweep


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of the machine, as far as this test goes; pytest has its own already."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own are too long for sockets
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == folder


def writes(code: int, name: str = "pymp-1") -> Callable[[], int]:
    def command() -> int:
        folder = Path(tempfile.mkdtemp())
        assert folder.parent == Path(os.environ["TMPDIR"]) and temp_folder.NAME.fullmatch(folder.parent.name)
        (folder.parent / name).mkdir()
        return code

    return command


def test_it_goes_with_the_command(base: Path) -> None:
    assert in_own_folder(writes(0)) == 0 and in_own_folder(writes(130, "ray")) == 130
    assert in_own_folder(writes(2)) == 2
    with pytest.raises(ZeroDivisionError):
        in_own_folder(lambda: 1 // 0)
    assert list(base.iterdir()) == []


def test_logs_of_a_failure_stay_until_the_next_command(base: Path) -> None:
    assert in_own_folder(writes(1, "ray")) == 1
    (left,) = base.iterdir()
    assert (left / "ray").is_dir()
    in_own_folder(writes(0))
    assert list(base.iterdir()) == []


def test_where_somebody_still_writes_the_next_command_comes_back(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(paths: Iterable[Path]) -> None:
        for path in paths:
            (path / temp_folder.LOCK).unlink()  # all that there was, and then there is more

    with monkeypatch.context() as patch:
        patch.setattr(temp_folder, "remove_paths", remove)
        in_own_folder(lambda: 0)
    assert len(list(base.iterdir())) == 1
    sweep(base)
    assert list(base.iterdir()) == []


OTHER = """
import os, sys, tempfile, time
from alphaapollo.utils.temp_folder import goes_with_it, in_own_folder

def command():
    goes_with_it(sys.argv[1:])
    open(tempfile.gettempdir() + "/left", "w").close()
    print("ready", flush=True)
    time.sleep(100)

in_own_folder(command)
"""


def test_what_a_kill_leaves_goes_and_what_the_living_have_stays(base: Path, tmp_path: Path) -> None:
    shared = Path(tempfile.mkdtemp(prefix="alphaapollo-test-", dir="/dev/shm"))
    (base / "alphaapollo-sandbox-x7k2q9lm").mkdir()  # of somebody else
    (base / "alphaapollo-x7k2q9lm").mkdir()  # as well: it has no lock
    environment = os.environ | {"PYTHONPATH": str(Path(alphaapollo.__file__).parents[1])}
    words = [sys.executable, "-c", OTHER, str(shared), str(tmp_path)]
    other = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
    try:
        assert other.stdout and other.stdout.readline() == b"ready\n"
        (folder,) = (path.parent for path in base.glob("*/left"))
        sweep(base)
        assert (folder / "left").exists() and shared.exists()
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    sweep(base)
    assert not folder.exists() and not shared.exists()
    assert tmp_path.exists(), "it is none of shared memory"
    assert sorted(path.name for path in base.iterdir()) == ["alphaapollo-sandbox-x7k2q9lm", "alphaapollo-x7k2q9lm"]


def test_without_a_command_nothing_is_noted(base: Path) -> None:
    goes_with_it(["/dev/shm/alphaapollo-7"])
    assert list(base.iterdir()) == []


def test_where_sockets_have_no_room_they_stay_outside(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    seen: list[tuple[bool, str | None]] = []

    def command() -> int:
        seen.append((os.environ["TMPDIR"] == str(base), os.environ.get("RAY_TMPDIR")))
        return 0

    for sockets, of_ray in ((100, 100), (100, 1), (1, 1)):
        monkeypatch.setattr(temp_folder, "SOCKETS", sockets)
        monkeypatch.setattr(temp_folder, "RAY_SOCKETS", of_ray)
        in_own_folder(command)
    assert seen == [(False, None), (False, str(base)), (True, None)]
    assert "RAY_TMPDIR" not in os.environ and list(base.iterdir()) == []


TWICE = """
import multiprocessing, os, sys
from alphaapollo.utils.temp_folder import in_own_folder

def command():
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join(60)
    return process.exitcode

if __name__ == "__main__":
    print(in_own_folder(command), in_own_folder(command))
"""


def test_a_process_may_call_two_commands_one_after_the_other(base: Path, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    environment = os.environ | {"PYTHONPATH": str(Path(alphaapollo.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "twice.py")],
        capture_output=True, text=True, timeout=90, check=False, env=environment,
    )  # fmt: skip
    assert done.stdout == "0 0\n" and not done.stderr, done.stderr
    assert list(base.iterdir()) == []
