"""A command from its start to its end: lock, exit code, messages, next commands."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import GenerationConfig, RmConfig, SftConfig
from alphaapollo.controller.errors import WorkerDied
from alphaapollo.launch import command
from alphaapollo.launch.command import (
    describe_changes,
    format_command,
    make_command,
    run_coroutine,
    show_run_end,
)
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.processes.watchdog import treat_signals_as_ctrl_c
from alphaapollo.runs.checkpoint_folder import write_progress
from tests.builders import write_rows
from tests.unit.processes.test_folder_lock import held_by_another_process


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
        main = make_command(GenerationConfig, "generation", "fake_command")
        return main([*(f"trainer.{key}" for key in folder), *words])

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
    with pytest.raises(KeyError):  # a bug
        run_command(run=fail_with(KeyError("name")))
    assert run_command(run=fail_with(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.endswith(f"interrupted; {hint}\n")


def test_the_folder_is_locked_and_has_a_status_only_while_a_command_runs(
    run_command: Callable[..., int], tmp_path: Path
) -> None:
    seen: list[tuple[bool, Path | None]] = []

    def look(*arguments: Any) -> Any:
        console = arguments[-1]  # `run` gets what `prepare_run` has returned
        seen.append(((tmp_path / "p/.run.lock").exists(), console.status_folder))
        return console

    assert run_command(prepare=look, run=look) == 0
    assert run_command("trainer.dry_run=true", prepare=look, run=look) == 0
    assert seen == [(True, None), (True, tmp_path / "p/run"), (False, None)]


def test_a_folder_in_use_is_not_touched(run_command: Callable[..., int], tmp_path: Path) -> None:
    done: list[object] = []
    with held_by_another_process(tmp_path / "p/run"):
        assert run_command(prepare=lambda *_: done.append("locked"), run=lambda *_: done.append("run")) == 2
        assert run_command("trainer.dry_run=true", prepare=lambda *_: done.append("dry run")) == 0
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


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(command, "is_available", lambda group, name: True)


def test_the_command_can_be_typed_without_an_activated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.shutil, "which", lambda name: None)
    monkeypatch.setattr(command.sys, "executable", str(Path.cwd() / ".venv/bin/python"))
    assert format_command("view", "outputs/$x") == ".venv/bin/python -m alphaapollo view 'outputs/$x'"


SCORES = [
    {"step": 0, "val/accuracy": 0.508},
    {"step": 1, "critic/score/mean": 0.2, "val/accuracy": None},
    {"step": 2, "critic/score/mean": 0.7, "val/accuracy": 0.9},
    {"step": 3, "critic/score/mean": 0.6, "val/accuracy": 0.8},
]
LOSSES = [{"step": step, "train/loss": loss} for step, loss in {50: 3.0, 75: 1.0, 100: 1.0, 150: 1.5}.items()]


@pytest.mark.parametrize(
    ("metrics", "since", "lines"),
    [
        (
            SCORES,
            0,
            [
                "val/accuracy 0.508 -> 0.800 in 3 iterations, best 0.900 in iteration 2 (4:10)",
                "critic/score/mean 0.200 -> 0.600 in 3 iterations, best 0.700 in iteration 2",
            ],
        ),
        (SCORES, None, ["val/accuracy 0.508 -> 0.800 in 3 iterations, best 0.900 in iteration 2"]),
        (LOSSES, 0, ["train/loss 3.000 (iteration 50) -> 1.500 in 150 iterations, best 1.000 in iteration 75 (4:10)"]),
    ],
)
def test_changes_of_the_main_metrics(
    tmp_path: Path, metrics: list[dict[str, float | None]], since: int | None, lines: list[str]
) -> None:
    write_rows(tmp_path / "metrics.jsonl", metrics)
    found = [" ".join(line.split()) for line in describe_changes(tmp_path, 250.0, since)]
    assert found[: len(lines)] == lines


def test_distillation_is_summarized_by_divergence_and_agreement(tmp_path: Path) -> None:
    names = ("critic/score/mean", "distill/agreement", "distill/divergence", "distill/reverse_kl")
    rows = [{"step": step, **dict.fromkeys(names, step / 10)} for step in (1, 2)]
    write_rows(tmp_path / "metrics.jsonl", rows)
    lines = [line.split() for line in describe_changes(tmp_path, 5.0, 0)]
    assert [line[0] for line in lines] == ["distill/divergence", "distill/agreement", "critic/score/mean"]
    assert lines[0][-5:-1] == ["0.100", "in", "iteration", "1"] and "best" not in lines[1]


def list_end(folder: Path, **options: Any) -> list[str]:
    file = io.StringIO()
    console = Console(Terminal(file=file))
    console.num_warnings = options.pop("num_warnings", 0)
    keep_best = options.pop("keep_best", None)
    outputs, project, name = folder.parents[1], folder.parent.name, folder.name
    trainer = {"output_dir": str(outputs), "project_name": project, "experiment_name": name}
    config = SftConfig if options.pop("can_chat", False) else RmConfig
    show_run_end(console, config.model_validate({"trainer": trainer | {"keep_best": keep_best}}))
    return file.getvalue().splitlines()


def test_next_commands_depend_on_what_the_run_has_written(tmp_path: Path) -> None:
    def commands(lines: list[str]) -> list[str]:
        """Commands after the heading, without the comments."""
        return [line.partition("   #")[0].strip() for line in lines[lines.index("next commands:") + 1 :]]

    view, samples, chat, export = (f"alphaapollo {verb} {tmp_path}" for verb in ("view", "samples", "chat", "export"))
    report = f"alphaapollo report {tmp_path} -o report.html"
    assert commands(list_end(tmp_path, can_chat=True)) == [view]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val/accu')
    assert describe_changes(tmp_path, 1.0, 0) == []
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "results.jsonl").touch()
    assert commands(list_end(tmp_path)) == [view, samples]
    (tmp_path / "metrics.jsonl").touch()
    checkpoint = tmp_path / "checkpoints/step_000004"
    checkpoint.mkdir(parents=True)
    write_progress(checkpoint, {"step": 4, "validation": {"val/accuracy": 0.5}})
    lines = list_end(tmp_path, can_chat=True, keep_best="val/accuracy", num_warnings=2)
    assert lines[0].startswith("warnings: 2") and lines[1] == f"val/accuracy is best in {checkpoint}"
    assert commands(lines) == [view, report, samples, chat, export]
    (tmp_path / "model").mkdir()
    lines = list_end(tmp_path)
    assert lines[0] == f"model: {tmp_path / 'model'}" and commands(lines) == [view, report, samples]
