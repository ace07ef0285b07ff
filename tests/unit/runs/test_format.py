"""The format of run folders, checkpoints and recordings: written at their creation, upgraded or refused when read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from alphaapollo import __version__
from alphaapollo.cli.show import find_samples_file
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config, EvalConfig, ExportConfig, GenerationConfig
from alphaapollo.evolving.export import export_training_rows
from alphaapollo.launch.export_checkpoint import prepare_export
from alphaapollo.runs.checkpoint_folder import (
    FORMAT,
    CheckpointFolder,
    check_format,
    find_damage,
    write_format,
    write_progress,
)
from alphaapollo.runs.resume import check_folder_belongs_to_command, find_inference_start, find_start_point
from alphaapollo.runs.run_history import RunPlan
from alphaapollo.runs.run_model import find_newest_model
from alphaapollo.trainer.replay.recording import read_recording
from alphaapollo.viewer.report import make_report
from alphaapollo.viewer.run_folders import read_run_state


def set_format(folder: Path, number: int, version: str = "9.8.7") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "format.json").write_text(json.dumps({"format": number, "version": version}))


def make_run(out: Path) -> tuple[Config, Path]:
    """Make the folder of a run with a checkpoint. Returns its configuration and the checkpoint."""
    config = Config(trainer={"output_dir": str(out), "project_name": "p", "experiment_name": "run"})  # type: ignore[arg-type]
    find_start_point(config).prepare_folder(config, RunPlan({}))
    checkpoints = CheckpointFolder(config.trainer.folder / "checkpoints", keep=None)
    writing = checkpoints.begin_checkpoint(2)
    write_progress(writing, {"step": 2})
    return config, checkpoints.complete_checkpoint(writing)


def test_new_run_folders_and_checkpoints_have_the_format(tmp_path: Path) -> None:
    config, checkpoint = make_run(tmp_path)
    for folder in (config.trainer.folder, checkpoint):
        assert json.loads((folder / "format.json").read_text()) == {"format": FORMAT, "version": __version__}
    (checkpoint / "format.json").write_text("{")
    assert [message.split()[0] for message in find_damage(checkpoint)] == ["format.json"]


@pytest.mark.parametrize("where", ["run", "checkpoint"])
def test_a_newer_format_is_refused_by_training_and_export(tmp_path: Path, where: str) -> None:
    config, checkpoint = make_run(tmp_path)
    newer = checkpoint if where == "checkpoint" else config.trainer.folder
    set_format(newer, FORMAT + 1)
    path = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(
                update={"resume_mode": "resume_path", "resume_from_path": str(checkpoint), "experiment_name": "other"}
            )
        }
    )
    for read in (
        lambda: find_start_point(config),
        lambda: find_start_point(path),
        lambda: find_newest_model(config.trainer.folder),
        lambda: prepare_export(ExportConfig(checkpoint=str(checkpoint))),
    ):
        with pytest.raises(ValueError) as refused:
            read()
        assert all(part in str(refused.value) for part in (str(newer), f"format {FORMAT + 1}", "9.8.7"))


READERS: dict[str, Callable[[Path], object]] = {
    "generate": lambda folder: find_inference_start(
        GenerationConfig(trainer={"output_dir": str(folder.parents[1])}),
        "results.jsonl",  # type: ignore[arg-type]
    ),
    "eval": lambda folder: check_folder_belongs_to_command(
        EvalConfig(trainer={"output_dir": str(folder.parents[1]), "experiment_name": "generation"})  # type: ignore[arg-type]
    ),
    "samples": lambda folder: find_samples_file(folder, None, False),
    "report": lambda folder: make_report([folder]),
    "pool": lambda folder: export_training_rows(folder, folder / "out", "truth", 1),
    "replay": read_recording,
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_a_newer_format(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "alphaapollo/generation"
    set_format(folder, FORMAT + 1)
    save_config(GenerationConfig(), folder / "config.yaml")
    with pytest.raises(ValueError, match=rf"{folder} has format {FORMAT + 1}, .* 9\.8\.7"):
        READERS[name](folder)
    assert read_run_state(folder).name == "unreadable" and "9.8.7" in read_run_state(folder).reason


def test_a_folder_without_a_number_is_read_and_not_changed(tmp_path: Path) -> None:
    check_format(tmp_path)
    assert [*tmp_path.iterdir()] == []
    write_format(tmp_path)
    check_format(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["format.json"]
