"""`alphaapollo reproduce`: what differs from a recorded run, and whether the numbers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alphaapollo.cli.main import main
from alphaapollo.config.load import load_config, save_config
from alphaapollo.config.schema import SftConfig
from alphaapollo.plugins.sweeps import reproduce
from alphaapollo.plugins.viewer.run_folders import find_runs
from alphaapollo.runs.command_history import PACKAGES, CommandRecord
from alphaapollo.runs.input_digests import compute_input_digests
from alphaapollo.runs.record_files import write_records
from alphaapollo.runs.run_plan import RunPlan, write_run_plan
from alphaapollo.utils.versions import list_versions
from tests.builders import write_rows

ROWS = [{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": 0.25, "val/loss": 0.1, "timing/step": 3.0}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "find_commit", lambda: "abc")
    (tmp_path / "train.parquet").write_bytes(b"recorded")
    words = ["data.train_files=train.parquet", "trainer.project_name=sweep_sft", "trainer.device=cpu", "model.path=o/m"]
    folder = (config := load_config(SftConfig, "sft", words)).trainer.folder
    save_config(config, folder / "config.yaml")
    write_run_plan(folder, RunPlan({}, inputs=compute_input_digests(config)))
    versions = dict(list_versions(PACKAGES)) | {"commit": "abc"}
    write_records(folder / "history.jsonl", [CommandRecord("", 0, 1, "finished", "", versions)])
    write_rows(folder / "metrics.jsonl", ROWS)
    return folder


@pytest.mark.parametrize(("loss", "code"), [(0.1, 0), (0.1000000000000001, 1)])
def test_a_run_is_trained_again_and_compared_at_each_validation(
    run: Path, loss: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(module: str, words: list[str], folder: Path, report: Any, show: bool) -> None:
        rows = [ROWS[0], ROWS[1] | {"val/loss": loss, "timing/step": 9.0}]
        config = load_config(SftConfig, "sft", words)
        assert module.endswith("main_sft") and config.trainer.folder == folder != run
        assert config.trainer.resume_mode == "disable"  # an earlier reproduction is not compared again
        folder.mkdir(parents=True)
        write_rows(folder / "metrics.jsonl", rows)
        for row in rows:
            report(row["step"], {name: value for name, value in row.items() if name != "step"})

    monkeypatch.setattr(reproduce, "run_in_child_process", train)
    reproduce.write_runs_to_reproduce(folder := run.parent / "to_reproduce", [run])
    assert [*find_runs(run.parent)] == [run]  # no other runs for the viewer
    assert main(["reproduce", str(folder)]) == code
    shown = capsys.readouterr().out
    assert "expected numbers: bit for bit" in shown and "differs:" not in shown
    assert shown.count("reproduced, step") == 1  # only the validation
    text = (
        "all 2 numbers are the same"
        if code == 0
        else "1 of 2 numbers differ, most: val/loss 0.1000000000000001 instead"
    )
    assert f"step 2: {text}" in shown and ("all 3 numbers" in shown) == (code == 0)


def test_what_differs_is_shown_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.parquet").write_bytes(b"other")
    write_records(
        run / "history.jsonl", [CommandRecord("", 0, 1, "finished", "", {"torch": "1.0", "commit": "b-dirty"})]
    )
    assert main(["reproduce", str(run), "optim.lr=0.5", "trainer.dry_run=True"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "torch: ",
        "instead of 1.0",
        "commit: abc",
        "changes that are not in it",
        "optim.lr: 0.5",
        "train_files: ",
    ):
        assert text in shown
    assert "may differ" in shown and "project_name" not in shown
    (run / "metrics.jsonl").unlink()
    assert main(["reproduce", str(run)]) == 2 and "metrics.jsonl is missing" in capsys.readouterr().err
    assert main(["reproduce", str(run), "trainer.resume_mode=auto"]) == 2 and "from scratch" in capsys.readouterr().err
    assert main(["reproduce", "gone"]) == 2 and "gone has no runs" in capsys.readouterr().err


def test_secrets_are_not_in_the_folder_for_others(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("path: o/m", "path: https://me:word@host/m"))
    reproduce.write_runs_to_reproduce(run.parent / "to_reproduce", [run])
    assert "word" not in (run.parent / "to_reproduce" / run.name / "config.yaml").read_text()


@pytest.mark.parametrize("code", ["model.trust_remote_code=true", "custom_reward_function.path=their_reward.py"])
def test_code_that_a_folder_names_must_be_repeated(run: Path, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.train_files=train.parquet", "trainer.project_name=sweep_sft", "trainer.device=cpu", "model.path=o/m"]
    save_config(load_config(SftConfig, "sft", [*words, code]), run / "config.yaml")
    assert main(["reproduce", str(run), "trainer.dry_run=True"]) == 2
    assert f"add {code.partition('=')[0]}" in capsys.readouterr().err.replace('"', "")
    assert main(["reproduce", str(run), "trainer.dry_run=True", code]) == 0
