from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.controller.ranks import WorkerDied
from alphaapollo.launch.failures import NotRestarted
from alphaapollo.launch.run_command import drive, run_until_told
from alphaapollo.utils.watchdog import ends_when_told

HOLD = """
import sys
from pathlib import Path
from alphaapollo.utils.folder_lock import lone_driver
with lone_driver(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


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


def test_a_death_after_a_signal_is_an_interrupt() -> None:
    async def end(told: bool) -> None:
        try:
            if told:
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
        finally:
            raise WorkerDied("the policy worker of rank 0 died", "policy")

    with ends_when_told():
        with pytest.raises(KeyboardInterrupt):
            run_until_told(end(True))
        with pytest.raises(WorkerDied):
            run_until_told(end(False))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
