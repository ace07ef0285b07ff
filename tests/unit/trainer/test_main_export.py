"""Checkpoints of several ranks as Hugging Face folders, in this process."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.load import save_config
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Config, Critic, ExportConfig, Model, SftConfig
from alphaapollo.models import sharding
from alphaapollo.runs.checkpoint_folder import write_manifest, write_progress
from alphaapollo.trainer.main_export import main, prepare_export
from alphaapollo.workers import export as worker_export
from alphaapollo.workers.critic import CriticWorker
from alphaapollo.workers.finetuning_worker import SftWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.unit.tiny import run_ranks

GENERATION_CONFIG = '{"eos_token_id": [1, 3], "temperature": 0.6, "top_k": 20, "of_the_model": {"any": 1}}'


def train(rank: int, num_ranks: int, address: str, model: str, run: str, role: str) -> None:
    """Change the weights slightly instead of training, so that they differ from those of the folder."""
    sharding.MIN_UNIT = 0
    config, placement = Model(path=model), RankPlacement(rank, num_ranks, address, "cpu", 1)
    resolved = resolve_model(config, "cpu")
    if role == "critic":
        worker: Any = CriticWorker(resolved, Critic(), placement, 1, seed=3)
    else:
        worker = SftWorker(SftConfig(model=config), resolved, placement, 1)
    for parameter in worker.model.parameters():
        parameter.data.mul_(1.25)
    worker.save(f"{run}/checkpoints/step_000002/{role}")
    if role == "model":
        worker.export(f"{run}/model")
    worker.get_save_future().result()
    worker.close()


def complete(checkpoint: Path, step: int = 2) -> Path:
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_progress(checkpoint, {"step": step})
    write_manifest(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def model(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    shutil.copytree(model_folder("qwen3"), folder)
    (folder / "generation_config.json").write_text(GENERATION_CONFIG)
    return str(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "run"
    run_ranks(train, 2, model, str(folder), "model")
    complete(folder / "checkpoints/step_000002")
    save_config(SftConfig(model={"path": model}), folder / "config.yaml")
    return folder


def test_the_export_equals_the_runs_own_export(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"checkpoint={run}", "dtype=float32"]) == 0
    output = run / "exported/step_000002"
    assert f"model written to {output}" in capsys.readouterr().out
    written, expected = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (output, run / "model")
    )
    card = written.pop("README.md").decode()
    assert written["generation_config.json"].decode() == GENERATION_CONFIG
    assert written == expected
    modes = {file.stat().st_mode for folder in (output, run / "model") for file in folder.iterdir()}
    assert len(modes) == 1  # others may read the weights, if they may read the other files
    assert "supervised fine-tuning), after iteration 2" in card
    assert "differ from those of the checkpoint by" in card
    assert not list((run / "exported").glob(".*"))
    assert main([f"checkpoint={run}", "dtype=float32"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_initial_model_that_moved_is_replaced_by_the_runs_own(run: Path, tmp_path: Path) -> None:
    """E.g. a relative model.path, and an export from another directory."""
    moved = tmp_path / "run"
    shutil.copytree(run, moved, ignore=shutil.ignore_patterns("exported"))
    save_config(SftConfig(model={"path": "no/such/model"}), moved / "config.yaml")
    assert prepare_export(ExportConfig(checkpoint=str(moved))).model.path == str(moved / "model")
    shutil.rmtree(moved / "model")
    with pytest.raises(ValueError, match=r"model\.path=no/such/model: no such folder"):
        prepare_export(ExportConfig(checkpoint=str(moved)))


def test_a_policy_has_its_own_section_and_folder(run: Path, tmp_path: Path) -> None:
    model = json.loads((run / "model/config.json").read_text())
    assert model["dtype"] == "float32"
    checkpoint = tmp_path / "ppo/checkpoints/step_000002"
    shutil.copytree(run / "checkpoints/step_000002/model", checkpoint / "policy")
    complete(checkpoint)
    role = {"model": {"path": "gone/elsewhere", "dtype": "bfloat16"}}
    save_config(Config(actor_rollout_ref=role), tmp_path / "ppo/config.yaml")
    export = prepare_export(
        ExportConfig(checkpoint=str(checkpoint), model_path=str(run / "model"), output=str(tmp_path / "hf"))
    )
    assert (export.weights_folder, export.model.path) == (checkpoint / "policy", str(run / "model"))
    assert (export.dtype, export.output) == ("bfloat16", tmp_path / "hf")


def test_invalid_exports_are_refused(run: Path, tmp_path: Path) -> None:
    for config, says in (
        (ExportConfig(), "checkpoint is required"),
        (ExportConfig(checkpoint=str(tmp_path)), "is no complete checkpoint .* writes checkpoints"),
        (ExportConfig(checkpoint=str(run), model_path="/gone"), "model_path: no such folder: /gone"),
        (ExportConfig(checkpoint=str(run), role="critic"), "no folder critic"),
    ):
        with pytest.raises(ValueError, match=says):
            prepare_export(config)
    checkpoint = complete(tmp_path / "run/checkpoints/step_000001", step=1)
    (tmp_path / "run/config.yaml").write_text("data: {}\n")
    with pytest.raises(ValueError, match=r"is not a run of main_ppo"):
        prepare_export(ExportConfig(checkpoint=str(checkpoint)))


def test_the_model_of_a_run_without_checkpoints_is_copied(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "model", tmp_path / "run/model")
    assert main([f"checkpoint={tmp_path / 'run'}"]) == 0
    copied = tmp_path / "run/exported/model"
    assert f"model written to {copied}" in capsys.readouterr().out
    names = sorted(file.name for file in (run / "model").iterdir())
    assert filecmp.cmpfiles(run / "model", copied, names, shallow=False)[0] == names
    assert main([f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'half'}", "dtype=bfloat16"]) == 0
    size = (copied / "model.safetensors").stat().st_size
    assert (tmp_path / "half/model.safetensors").stat().st_size < 0.6 * size
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    assert main([f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'critic'}", "role=critic"]) == 2
    assert "only a model. Remove role=critic" in capsys.readouterr().err


def test_what_computes_otherwise_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = worker_export.compute_transformers_outputs
    monkeypatch.setattr(
        worker_export, "compute_transformers_outputs", lambda *given: [one + 0.5 for one in right(*given)]
    )
    assert main([f"checkpoint={run}", f"output={tmp_path / 'hf'}", "dtype=float32"]) == 1
    assert "differ from the original's by 5.0e-01" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def critic_run(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "ppo"
    run_ranks(train, 2, model, str(folder), "critic")
    complete(folder / "checkpoints/step_000002")
    save_config(Config(actor_rollout_ref={"model": {"path": model}}), folder / "config.yaml")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_is_a_token_classifier(critic_run: Path, tmp_path: Path, dtype: str) -> None:
    from transformers import AutoModelForTokenClassification

    with pytest.raises(ValueError, match="has no folder policy or model"):
        prepare_export(ExportConfig(checkpoint=str(critic_run)))
    assert main([f"checkpoint={critic_run}", "role=critic", f"dtype={dtype}", f"output={tmp_path / 'hf'}"]) == 0
    loaded, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.num_labels == 1
    assert "The critic of a run" in (tmp_path / "hf/README.md").read_text()
