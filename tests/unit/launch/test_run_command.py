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

from alphaapollo.config.schema import GenerationConfig
from alphaapollo.controller.ranks import WorkerDied
from alphaapollo.launch.command import make_command, run_coroutine
from alphaapollo.processes.watchdog import treat_signals_as_ctrl_c

HOLD = """
import sys
from pathlib import Path
from alphaapollo.processes.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def fail_with(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.fixture
def run_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Function that runs main_generation with other functions `prepare_run` and `run`. Returns its exit code."""

    def run_command(*words: str, prepare: Callable[..., Any] = lambda *_: 1, run: Callable[..., Any] = print) -> int:
        async def run_later(*arguments: object) -> None:
            run(*arguments)

        monkeypatch.setitem(sys.modules, "fake_command", SimpleNamespace(prepare_run=prepare, run=run_later))  # type: ignore[arg-type]
        folder = ("project_name=p", "experiment_name=run", f"output_dir={tmp_path}")
        return make_command(GenerationConfig, "generation", "fake_command")(
            [*(f"trainer.{key}" for key in folder), *words]
        )

    return run_command


def test_each_end_has_its_exit_code_and_message(
    run_command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command() == 0
    assert "next commands:" in capsys.readouterr().out
    assert run_command(prepare=fail_with(ValueError("unset"))) == 2
    printed = capsys.readouterr()
    assert printed.err == "error: unset\n" and "next commands" not in printed.out
    hint = f"run the same command to resume from {tmp_path / 'p/run'}"
    for error in (ValueError("what, got, fix"), WorkerDied("a worker died", "policy")):
        assert run_command(run=fail_with(error)) == 1
        printed = capsys.readouterr()
        assert printed.err == f"error: {error}\n" and printed.out.endswith(f"{hint}\n")
    assert run_command(run=fail_with(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.endswith(f"interrupted; {hint}\n")


def test_a_bug_is_not_a_failure(run_command: Callable[..., int]) -> None:
    with pytest.raises(KeyError):
        run_command(run=fail_with(KeyError("name")))


def test_the_folder_is_locked_while_a_command_is_prepared_and_runs(
    run_command: Callable[..., int], tmp_path: Path
) -> None:
    locks: list[bool] = []

    def look(*_: object) -> None:
        locks.append((tmp_path / "p/.run.lock").exists())

    assert run_command(prepare=look, run=look) == 0
    assert run_command("trainer.dry_run=true", prepare=look, run=look) == 0
    assert locks == [True, True, False]


def test_status_is_written_only_while_a_command_runs(run_command: Callable[..., int], tmp_path: Path) -> None:
    folders: list[Path | None] = []

    def look(*arguments: Any) -> None:
        folders.append(arguments[-1].status_folder)

    assert run_command(prepare=look, run=look) == 0
    assert run_command("trainer.dry_run=true", prepare=look, run=look) == 0
    assert folders == [None, tmp_path / "p/run", None]


def test_a_folder_in_use_is_not_touched(run_command: Callable[..., int], tmp_path: Path) -> None:
    done: list[object] = []
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "p/run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        assert run_command(prepare=lambda *_: done.append("locked"), run=lambda *_: done.append("run")) == 2
        assert run_command("trainer.dry_run=true", prepare=lambda *_: done.append("dry run")) == 0
        holder.kill()
    assert done == ["dry run"]


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
