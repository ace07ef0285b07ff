from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.controller.ranks import WorkerDied
from alphaapollo.launch.failures import RestartRefused
from alphaapollo.launch.run_command import run_coroutine, run_in_locked_folder
from alphaapollo.observability.console import Console
from alphaapollo.processes.watchdog import treat_signals_as_ctrl_c

HOLD = """
import sys
from pathlib import Path
from alphaapollo.processes.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def trainer(folder: Path, dry_run: bool = False) -> Any:
    return SimpleNamespace(folder=folder / "run", dry_run=dry_run)


def run_command(trainer: Any, prepare: Callable[[], Any], run: Callable[[Any], None]) -> int:
    console = Console()
    return run_in_locked_folder(
        trainer, console, prepare, run, lambda: console.show_end(["what changed"]), lambda: "resume hint"
    )


def raising(error: BaseException) -> None:
    raise error


def test_each_end_has_its_exit_code_and_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(error: BaseException) -> int:
        return run_command(trainer(tmp_path), int, lambda _: raising(error))

    assert run_command(trainer(tmp_path), int, lambda _: None) == 0
    assert capsys.readouterr().out == "what changed\n"
    assert run_command(trainer(tmp_path), lambda: raising(ValueError("unset")), lambda _: None) == 2
    assert capsys.readouterr() == ("", "error: unset\n")
    assert code(ValueError("what, got, fix")) == 1
    assert code(RestartRefused("a worker died")) == 1
    assert code(KeyboardInterrupt()) == 130
    printed = capsys.readouterr()
    assert printed.out == "what changed\nresume hint\n" * 2 + "what changed\n"
    assert printed.err.splitlines()[:2] == ["error: what, got, fix", "error: a worker died"]
    assert printed.err.endswith("interrupted; resume hint\n")


def test_a_bug_is_not_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        run_command(trainer(tmp_path), int, lambda _: raising(KeyError("name")))


def test_the_folder_is_locked_while_a_command_is_prepared_and_runs(tmp_path: Path) -> None:
    locks: list[bool] = []

    def look(*_: object) -> None:
        locks.append((tmp_path / ".run.lock").exists())

    assert run_command(trainer(tmp_path), lambda: look(), look) == 0
    assert run_command(trainer(tmp_path, dry_run=True), lambda: look(), look) == 0
    assert locks == [True, True, False]


@pytest.mark.timeout(60)
def test_a_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    done: list[int] = []
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        assert run_command(trainer(tmp_path), lambda: done.append(1), done.append) == 2
        assert run_command(trainer(tmp_path, dry_run=True), lambda: done.append(2), done.append) == 0
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
