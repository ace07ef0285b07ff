from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.startup import drive as home
from alphaapollo.startup.drive import drive
from alphaapollo.startup.failures import NotRestarted

HOLD = """
import sys
from pathlib import Path
from alphaapollo.folder_lock import lone_driver
with lone_driver(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "end_when_told", lambda: None)  # pytest's own stay


def raising(error: BaseException) -> None:
    raise error


def test_each_end_has_its_code_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(error: BaseException) -> int:
        return drive(tmp_path / "run", lambda: raising(error), lambda: "it goes on")

    assert drive(tmp_path / "run", lambda: None, lambda: "it goes on") == 0
    assert code(ValueError("what, got, fix")) == 1
    assert code(NotRestarted("who died")) == 1
    assert code(KeyboardInterrupt()) == 130
    said = capsys.readouterr().err
    assert "what, got, fix" in said
    assert "who died" in said
    assert said.endswith("\nit goes on\n")


def test_a_bug_is_not_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        drive(tmp_path / "run", lambda: raising(KeyError("name")), str)


@pytest.mark.timeout(60)
def test_a_folder_that_another_works_in_is_left_alone(tmp_path: Path) -> None:
    done: list[int] = []
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        assert drive(tmp_path / "run", lambda: done.append(1), str) == 2
        holder.kill()
    assert not done
