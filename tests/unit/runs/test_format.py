"""The format of run folders, checkpoints and recordings: written, refused if it is newer, and read if it is older."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alphaapollo import __version__
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import EvalConfig, ExportConfig, GenerationConfig
from alphaapollo.runs.checkpoint_folder import FORMAT, find_damage
from alphaapollo.runs.newest_model import find_newest_model, make_generation_config_values
from alphaapollo.runs.resume import check_folder_belongs_to_command, find_inference_start, find_start_point
from alphaapollo.trainer.main_export import main as export
from alphaapollo.trainer.main_export import prepare_export
from alphaapollo.trainer.replay.recording import read_recording
from tests.old_runs.make import ARCHIVES, unpack
from tests.unit.run_folders import make_config, train


def set_format(folder: Path, number: int, version: str = "9.8.7") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "format.json").write_text(json.dumps({"format": number, "version": version}))


def test_new_run_folders_and_checkpoints_have_the_format(tmp_path: Path) -> None:
    checkpoint = train(config := make_config(tmp_path), 2)
    for folder in (config.trainer.folder, checkpoint):
        assert json.loads((folder / "format.json").read_text()) == {"format": FORMAT, "version": __version__}
    (checkpoint / "format.json").write_text("{")
    assert [message.split()[0] for message in find_damage(checkpoint)] == ["format.json"]


@pytest.mark.parametrize("where", ["run", "checkpoint"])
def test_a_newer_format_is_refused_by_training_and_export(tmp_path: Path, where: str) -> None:
    checkpoint = train(config := make_config(tmp_path), 2)
    newer = checkpoint if where == "checkpoint" else config.trainer.folder
    set_format(newer, FORMAT + 1)
    source = {"resume_mode": "resume_path", "resume_from_path": str(checkpoint), "experiment_name": "other"}
    for read in (
        lambda: find_start_point(config),
        lambda: find_start_point(make_config(tmp_path, trainer=source)),
        lambda: find_newest_model(config.trainer.folder),
        lambda: prepare_export(ExportConfig(checkpoint=str(checkpoint))),
    ):
        with pytest.raises(ValueError) as refused:
            read()
        assert all(part in str(refused.value) for part in (str(newer), f"format {FORMAT + 1}", "9.8.7"))


READERS: dict[str, Callable[[Path], object]] = {
    "generate": lambda folder: find_inference_start(make_config(folder.parents[1], GenerationConfig), "results.jsonl"),
    "eval": lambda folder: check_folder_belongs_to_command(make_config(folder.parents[1], EvalConfig)),
    "replay": read_recording,
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_a_newer_format(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "p/run"
    set_format(folder, FORMAT + 1)
    save_config(GenerationConfig(), folder / "config.yaml")
    with pytest.raises(ValueError, match=rf"{folder} has format {FORMAT + 1}, .* 9\.8\.7"):
        READERS[name](folder)


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with unpack(request.param, tmp_path) as folder:
        yield folder


def test_checkpoints_and_recordings_are_read(runs: Path) -> None:
    recording = runs / "rl/recorded/step_000002"
    if (recording / "groups.msgpack").is_file():  # formats before 2
        with pytest.raises(ValueError, match=r"groups\.msgpack"):
            read_recording(recording)
    else:
        inputs, outcome = read_recording(recording)
        assert inputs.step == 2 and len(inputs.groups) == 2 and outcome is not None
    newest = find_newest_model(runs / "rl")  # what chat, serve and eval read
    assert newest.source is not None and make_generation_config_values(newest)["rollout"]["name"] == "fake"


def test_checkpoints_are_exported(runs: Path) -> None:
    for name in ("rl", "sft"):
        assert export([f"checkpoint={runs / name}"]) == 0
        assert "README.md" in {file.name for file in (runs / name / "exported/step_000002").iterdir()}
