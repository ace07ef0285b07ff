from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller.ranks import WorkerDied
from alphaapollo.launch.failures import RestartRefused
from alphaapollo.launch.run_command import run_coroutine, run_in_locked_folder
from alphaapollo.utils.watchdog import treat_signals_as_ctrl_c

HOLD = """
import sys
from pathlib import Path
from alphaapollo.utils.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def trainer(folder: Path, dry_run: bool = False) -> Any:
    return SimpleNamespace(folder=folder / "run", dry_run=dry_run)


def raising(error: BaseException) -> None:
    raise error


def test_each_end_has_its_exit_code_and_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(error: BaseException) -> int:
        return run_in_locked_folder(trainer(tmp_path), int, lambda _: raising(error), lambda: "resume hint")

    assert run_in_locked_folder(trainer(tmp_path), int, lambda _: None, lambda: "resume hint") == 0
    assert run_in_locked_folder(trainer(tmp_path), lambda: raising(ValueError("unset")), lambda _: None, str) == 2
    assert code(ValueError("what, got, fix")) == 1
    assert code(RestartRefused("a worker died")) == 1
    assert code(KeyboardInterrupt()) == 130
    printed = capsys.readouterr().err
    assert "what, got, fix" in printed
    assert "a worker died" in printed
    assert printed.endswith("\nresume hint\n")


def test_a_bug_is_not_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run_in_locked_folder(trainer(tmp_path), int, lambda _: raising(KeyError("name")), str)


def test_the_folder_is_locked_while_a_command_is_prepared_and_runs(tmp_path: Path) -> None:
    locks: list[bool] = []

    def look(*_: object) -> None:
        locks.append((tmp_path / ".run.lock").exists())

    assert run_in_locked_folder(trainer(tmp_path), lambda: look(), look, str) == 0
    assert run_in_locked_folder(trainer(tmp_path, dry_run=True), lambda: look(), look, str) == 0
    assert locks == [True, True, False]


@pytest.mark.timeout(60)
def test_a_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    done: list[int] = []
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        assert run_in_locked_folder(trainer(tmp_path), lambda: done.append(1), done.append, str) == 2
        assert run_in_locked_folder(trainer(tmp_path, dry_run=True), lambda: done.append(2), done.append, str) == 0
        holder.kill()
    assert done == [2]


def test_a_death_after_a_signal_is_an_interrupt() -> None:
    async def end(signalled: bool) -> None:
        try:
            if signalled:
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
        finally:
            raise WorkerDied("the policy worker of rank 0 died", "policy")

    with treat_signals_as_ctrl_c():
        with pytest.raises(KeyboardInterrupt):
            run_coroutine(end(True))
        with pytest.raises(WorkerDied):
            run_coroutine(end(False))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
