from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.launch import run_end
from alphaapollo.launch.checkpoint_folder import write_progress
from alphaapollo.launch.run_end import describe_changes, format_command, open_console, show_run_end
from alphaapollo.observability.console import Console
from alphaapollo.observability.terminal import Terminal


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
    assert describe_changes(tmp_path, 250.0, 0) == [
        "val/accuracy       0.508 -> 0.800 in 3 iterations, best 0.900 in iteration 2 (4:10)",
        "critic/score/mean  0.200 -> 0.600 in 3 iterations, best 0.700 in iteration 2",
    ]
    assert describe_changes(tmp_path, 250.0, 2)[0].endswith(" (4:10 since iteration 2)")
    assert describe_changes(tmp_path, 250.0, None)[0].endswith("best 0.900 in iteration 2")


def test_lower_losses_are_better(tmp_path: Path) -> None:
    losses = {50: 3.0, 100: 1.0, 150: 1.5}
    write_metrics(tmp_path, *({"step": step, "train/loss": loss} for step, loss in losses.items()))
    (line,) = describe_changes(tmp_path, 5.0, 0)
    assert line == (
        "train/loss         3.000 (iteration 50) -> 1.500 in 150 iterations, best 1.000 in iteration 100 (0:05)"
    )
    write_metrics(tmp_path, {"step": 7, "val/loss": 2.0})
    assert describe_changes(tmp_path, 5.0, 0) == ["val/loss           2.000 in iteration 7 (0:05)"]


def test_a_run_without_metrics_has_no_changes(tmp_path: Path) -> None:
    assert describe_changes(tmp_path, 1.0, 0) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val/accu')
    assert describe_changes(tmp_path, 1.0, 0) == []


def list_end(folder: Path, **options: Any) -> list[str]:
    file = io.StringIO()
    console = Console(Terminal(file=file))
    console.num_warnings = options.pop("num_warnings", 0)
    show_run_end(console, folder, **options)
    return file.getvalue().splitlines()


def test_next_commands_depend_on_what_the_run_has_written(tmp_path: Path) -> None:
    view = f"  alphaapollo view {tmp_path}   # curves and samples in the browser"
    samples = f"  alphaapollo samples {tmp_path}   # answers side by side"
    report = f"  alphaapollo report {tmp_path} -o report.html   # all in one file"
    chat = f"  alphaapollo chat {tmp_path}   # chat with the model"
    assert list_end(tmp_path, can_chat=True) == ["next commands:", view]
    (tmp_path / "results.jsonl").touch()
    assert list_end(tmp_path) == ["next commands:", view, samples]
    (tmp_path / "metrics.jsonl").touch()
    checkpoint = tmp_path / "checkpoints/step_000004"
    checkpoint.mkdir(parents=True)
    write_progress(checkpoint, {"step": 4, "validation": {"val/accuracy": 0.5}})
    assert list_end(tmp_path, can_chat=True, keep_best="val/accuracy", num_warnings=2) == [
        "warnings: 2, printed above",
        f"val/accuracy is best in {checkpoint}",
        "next commands:",
        view,
        report,
        samples,
        chat,
        f"  alphaapollo export {tmp_path}   # for transformers and vLLM",
    ]
    (tmp_path / "model").mkdir()
    assert list_end(tmp_path) == [f"model: {tmp_path / 'model'}", "next commands:", view, report, samples]


def test_a_folder_that_cannot_be_read_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(run_end, "list_next_commands", fail)
    assert list_end(tmp_path) == []
