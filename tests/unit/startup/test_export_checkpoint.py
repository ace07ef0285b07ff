"""Checkpoints of several ranks as Hugging Face folders, in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from alphaapollo.checkpoint_folder import write_progress
from alphaapollo.config.load import save_config
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Config, ExportConfig, SftConfig
from alphaapollo.models import sharding
from alphaapollo.startup.export_checkpoint import prepare
from alphaapollo.trainer.main_export import main
from alphaapollo.workers.base import RankPlacement
from alphaapollo.workers.sft import SftWorker
from tests.unit.tiny import run_ranks, save_model


def train(rank: int, num_ranks: int, address: str, model: str, run: str) -> None:
    """No step is made: the weights are moved by a little, so that they are not those of the folder."""
    sharding.MIN_UNIT = 0
    config, placement = SftConfig(model={"path": model}), RankPlacement(rank, num_ranks, address, "cpu", 1)
    worker = SftWorker(config, resolve_model(config.model, "cpu"), placement, 1)
    for parameter in worker.model.parameters():
        parameter.data.mul_(1.25)
    worker.save(f"{run}/checkpoints/step_000002/model")
    worker.export(f"{run}/model")
    worker.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "run"
    model = str(save_model("qwen3", tmp_path_factory.mktemp("qwen3")))
    run_ranks(train, 2, model, str(folder))
    write_progress(folder / "checkpoints/step_000002", {"step": 2})
    save_config(SftConfig(model={"path": model}), folder / "config.yaml")
    return folder


@pytest.mark.timeout(120)
def test_it_is_what_the_run_exports_at_its_end(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"checkpoint={run}", "dtype=float32"]) == 0
    output = run / "exported/step_000002"
    assert f"the model lies in {output}" in capsys.readouterr().out
    written, expected = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (output, run / "model")
    )
    assert written == expected
    assert main([f"checkpoint={run}", "dtype=float32"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_policy_has_its_own_section_and_folder(run: Path, tmp_path: Path) -> None:
    model = json.loads((run / "model/config.json").read_text())
    assert model["dtype"] == "float32"
    checkpoint = tmp_path / "ppo/checkpoints/step_000002"
    shutil.copytree(run / "checkpoints/step_000002/model", checkpoint / "policy")
    write_progress(checkpoint, {"step": 2})
    role = {"model": {"path": "gone/elsewhere", "dtype": "bfloat16"}}
    save_config(Config(actor_rollout_ref=role), tmp_path / "ppo/config.yaml")
    export = prepare(
        ExportConfig(checkpoint=str(checkpoint), model_path=str(run / "model"), output=str(tmp_path / "hf"))
    )
    assert (export.weights, export.model.path) == (checkpoint / "policy", str(run / "model"))
    assert (export.dtype, export.output) == ("bfloat16", tmp_path / "hf")


def test_what_cannot_be_exported_is_told(run: Path, tmp_path: Path) -> None:
    for config, says in (
        (ExportConfig(), "checkpoint: required"),
        (ExportConfig(checkpoint=str(tmp_path)), "is no whole checkpoint"),
        (ExportConfig(checkpoint=str(run), model_path="/gone"), "model_path: no such folder: /gone"),
    ):
        with pytest.raises(ValueError, match=says):
            prepare(config)
    checkpoint = tmp_path / "run/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    write_progress(checkpoint, {"step": 1})
    (tmp_path / "run/config.yaml").write_text("data: {}\n")
    with pytest.raises(ValueError, match=r"no config\.yaml of main_ppo or main_sft"):
        prepare(ExportConfig(checkpoint=str(checkpoint)))
