from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import RmConfig, SftConfig
from alphaapollo.launch import command as run_end
from alphaapollo.launch.command import describe_changes, format_command, open_console, show_run_end
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal
from alphaapollo.runs.checkpoint_folder import write_progress


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_end.shutil, "which", lambda name: f"/usr/bin/{name}")


def write_metrics(folder: Path, *lines: dict[str, float | None]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_first_line_names_the_viewer(dry_run: bool, capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = SimpleNamespace(folder=Path("outputs/my run"), dry_run=dry_run)
    with open_console(trainer):
        pass
    line = "alphaapollo view 'outputs/my run'   # follow this run in the browser\n"
    assert capsys.readouterr().out == ("" if dry_run else line)


def test_the_command_can_be_typed_without_an_activated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_end.shutil, "which", lambda name: None)
    monkeypatch.setattr(run_end.sys, "executable", str(Path.cwd() / ".venv/bin/python"))
    assert format_command("view", "outputs/$x") == ".venv/bin/python -m alphaapollo view 'outputs/$x'"


def test_changes_of_the_main_metrics(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        {"step": 0, "val/accuracy": 0.508},
        {"step": 1, "critic/score/mean": 0.2, "val/accuracy": None},
        {"step": 2, "critic/score/mean": 0.7, "val/accuracy": 0.9},
        {"step": 3, "critic/score/mean": 0.6, "val/accuracy": 0.8},
    )
    accuracy, score = describe_changes(tmp_path, 250.0, 0)
    for line, facts in (
        (accuracy, ("val/accuracy ", "0.508 -> 0.800 in 3 iterations", "0.900 in iteration 2 (4:10)")),
        (score, ("critic/score/mean ", "0.200 -> 0.600 in 3 iterations", "0.700 in iteration 2")),
    ):
        assert line.startswith(facts[0]) and facts[1] in line and line.endswith(facts[2])
    assert describe_changes(tmp_path, 250.0, 2)[0].endswith(" (4:10 since iteration 2)")
    assert describe_changes(tmp_path, 250.0, None)[0].endswith("best 0.900 in iteration 2")


def test_lower_losses_are_better(tmp_path: Path) -> None:
    losses = {50: 3.0, 100: 1.0, 150: 1.5}
    write_metrics(tmp_path, *({"step": step, "train/loss": loss} for step, loss in losses.items()))
    (line,) = describe_changes(tmp_path, 5.0, 0)
    for fact in ("train/loss ", "3.000 (iteration 50) -> 1.500 in 150 iterations", "1.000 in iteration 100 (0:05)"):
        assert fact in line
    write_metrics(tmp_path, {"step": 7, "val/loss": 2.0})
    assert describe_changes(tmp_path, 5.0, 0)[0].split() == ["val/loss", "2.000", "in", "iteration", "7", "(0:05)"]


def test_distillation_is_summarized_by_divergence_and_agreement(tmp_path: Path) -> None:
    names = ("critic/score/mean", "distill/agreement", "distill/divergence", "distill/reverse_kl")
    write_metrics(tmp_path, *({"step": step, **dict.fromkeys(names, step / 10)} for step in (1, 2)))
    lines = [line.split() for line in describe_changes(tmp_path, 5.0, 0)]
    assert [line[0] for line in lines] == ["distill/divergence", "distill/agreement", "critic/score/mean"]
    assert lines[0][-5:-1] == ["0.100", "in", "iteration", "1"] and "best" not in lines[1]


def test_a_run_without_metrics_has_no_changes(tmp_path: Path) -> None:
    assert describe_changes(tmp_path, 1.0, 0) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val/accu')
    assert describe_changes(tmp_path, 1.0, 0) == []


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


def test_a_folder_that_cannot_be_read_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(run_end, "list_next_commands", fail)
    assert list_end(tmp_path) == []
