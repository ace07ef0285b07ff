"""Digests of data, code and models: what a resumed run does if their content has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from alphaapollo.config.schema import Config, DpoConfig, EvolvingConfig, GenerationConfig, RmConfig, SftConfig
from alphaapollo.runs import input_digests
from alphaapollo.runs.checkpoint_folder import CheckpointFolder, read_inputs, write_progress
from alphaapollo.runs.input_digests import compute_input_digests, digest_file
from alphaapollo.runs.resume import StartPoint, find_inference_start, find_start_point
from alphaapollo.runs.run_history import RunPlan, read_run_plan

ROWS = '{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "2 + 2?", "answer": "4"}\n'
SHUFFLED = "".join(reversed(ROWS.splitlines(keepends=True)))
TRAINED = {Config: "prompts_consumed", SftConfig: "examples_consumed", DpoConfig: "examples_consumed"}
TRAINED |= {RmConfig: "examples_consumed"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text(ROWS)
    (tmp_path / "reward.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("import os\n")
    (tmp_path / "environment.py").write_text("")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path


def configure(schema: type[Any], folder: Path, **trainer: object) -> Any:
    values: dict[str, Any] = {
        "data": {"train_files": str(folder / "train.jsonl"), "val_files": [str(folder / "val.jsonl")]},
        "trainer": {"output_dir": str(folder / "out"), "project_name": "p", "experiment_name": "run"} | trainer,
    }
    model = {"model": {"path": str(folder / "model")}}
    if schema is Config:
        code = {"custom_reward_function": {"path": str(folder / "reward.py")}}
        values |= code | {"env": {"custom_module": str(folder / "environment.py")}, "actor_rollout_ref": model}
    return schema(**values, **({} if schema is Config else model))


def train(config: Any, step: int, position: int) -> Path:
    """Make the folder of a run that reached iteration `step`, with a checkpoint."""
    start, run = find_start_point(config), config.trainer.folder
    start.prepare_folder(config, RunPlan({}))
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {one}}}\n' for one in range(step + 1)))
    checkpoints = CheckpointFolder(run / "checkpoints", None, inputs=start.inputs)
    writing = checkpoints.begin_checkpoint(step)
    write_progress(writing, {"step": step, TRAINED[type(config)]: position})
    return checkpoints.complete_checkpoint(writing)


def list_changes(start: StartPoint) -> list[tuple[str, str]]:
    return [(change.key, change.verdict) for change in start.config_changes]


@pytest.mark.parametrize("schema", TRAINED)
def test_changed_training_data_is_refused_unless_a_key_allows_it(schema: type[Any], folder: Path) -> None:
    config = configure(schema, folder)
    train(config, 2, position=8)
    (folder / "train.jsonl").write_text(SHUFFLED)
    with pytest.raises(ValueError, match=r"data\.train_files=.*train\.jsonl.*resume_with_other_data=true"):
        find_start_point(config)
    allowed = configure(schema, folder, resume_with_other_data=True)
    start = find_start_point(allowed)
    assert list_changes(start) == [("data.train_files", "applied")]
    assert start.has_other_data and start.inputs.data_start == 8
    assert len(start.describe()) == 3  # resumes, the file, the new order
    train(allowed, 4, position=16)
    start = find_start_point(config)
    assert list_changes(start) == [] and start.inputs.data_start == 8, "the order continues in the next resume"


def test_the_key_also_allows_another_file(folder: Path) -> None:
    train(configure(Config, folder), 2, position=8)
    (folder / "other.jsonl").write_text(ROWS + ROWS)
    values = configure(Config, folder).model_dump()
    values["data"]["train_files"] = str(folder / "other.jsonl")
    with pytest.raises(ValueError, match=r"data\.train_files"):
        find_start_point(Config(**values))
    values["trainer"]["resume_with_other_data"] = True
    values["env"]["env_name"] = "other"
    with pytest.raises(ValueError, match=r"env\.env_name"):
        find_start_point(Config(**values))
    values["env"] = configure(Config, folder).env.model_dump()
    assert find_start_point(Config(**values)).inputs.data_start == 8


CHANGES: dict[str, tuple[str, str]] = {  # file -> key, part of the message
    "val.jsonl": ("data.val_files", "val.jsonl"),
    "reward.py": ("custom_reward_function.path", "reward.py"),
    "helper.py": ("custom_reward_function.path", "helper.py"),
    "environment.py": ("env.custom_module", "environment.py"),
    "model/chat_template.jinja": ("actor_rollout_ref.model.path", "chat_template.jinja"),
    "model/tokenizer_config.json": ("actor_rollout_ref.model.path", "tokenizer_config.json"),
    "model/config.json": ("actor_rollout_ref.model.path", "config.json"),
    "model/model.safetensors": ("actor_rollout_ref.model.path", "model.safetensors"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_changes_of_content_are_notices(name: str, folder: Path) -> None:
    config, file = configure(Config, folder), folder / name
    train(config, 2, position=8)
    file.write_bytes(file.read_bytes() + b"\n")
    start = find_start_point(config)
    key, shown = CHANGES[name]
    assert list_changes(start) == [(key, "applied")] and not start.has_other_data
    (line,) = [line for line in start.describe() if key in line]
    assert shown in line and "applied" in line


def test_files_of_the_same_content_may_move(folder: Path) -> None:
    config = configure(Config, folder)
    checkpoint = train(config, 2, position=8)
    moved = folder / "moved"
    moved.mkdir()
    for name in ("train.jsonl", "val.jsonl", "reward.py", "helper.py", "environment.py", "model"):
        (folder / name).rename(moved / name)
    values = configure(Config, moved).model_dump()
    values["trainer"] = config.trainer.model_dump()
    start = find_start_point(Config(**values))
    assert start.describe() == [f"resumes from {checkpoint}."] and start.inputs.data_start == 0
    start.prepare_folder(Config(**values), RunPlan({}))
    assert (config.trainer.folder / "config.1.yaml").is_file(), "the newest configuration has the new paths"


def test_old_checkpoints_without_digests_resume(folder: Path) -> None:
    config = configure(Config, folder)
    checkpoint = train(config, 2, position=8)
    (checkpoint / "inputs.json").unlink()
    manifest = checkpoint / "manifest.json"
    written = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({name: one for name, one in written.items() if name != "inputs.json"}))
    (folder / "train.jsonl").write_text(SHUFFLED)
    assert find_start_point(config).describe() == [f"resumes from {checkpoint}."]


def test_a_restart_compares_the_data_that_the_run_has_read(folder: Path) -> None:
    config = configure(SftConfig, folder)
    train(config, 2, position=8)
    before = find_start_point(config).inputs.digests
    (folder / "train.jsonl").write_text(SHUFFLED)
    assert list_changes(find_start_point(config, before)) == []


def test_another_run_may_continue_with_other_data(folder: Path) -> None:
    checkpoint = train(configure(Config, folder), 2, position=8)
    (folder / "train.jsonl").write_text(SHUFFLED)
    source = {"resume_mode": "resume_path", "resume_from_path": str(checkpoint)}
    start = find_start_point(configure(Config, folder, experiment_name="second", **source))
    assert start.has_other_data and start.inputs.data_start == 8


def test_digests_are_in_the_checkpoint_and_in_the_plan(folder: Path) -> None:
    config = configure(Config, folder)
    checkpoint = train(config, 2, position=8)
    digests, plan = compute_input_digests(config), read_run_plan(config.trainer.folder)
    assert plan and read_inputs(checkpoint).digests == plan.inputs == digests
    names = {key: [Path(path).name for path, _ in files] for key, files in digests.items()}
    model = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert names == {
        "data.train_files": ["train.jsonl"],
        "data.val_files": ["val.jsonl"],
        "custom_reward_function.path": ["reward.py", "helper.py"],
        "env.custom_module": ["environment.py"],
        "actor_rollout_ref.model.path": model,
    }


def test_generation_reports_changes_since_its_plan(folder: Path) -> None:
    values: dict[str, Any] = {"data": {"path": str(folder / "val.jsonl")}, "model": {"path": str(folder / "model")}}
    values["custom_reward_function"] = {"path": str(folder / "reward.py")}
    config = GenerationConfig(**values, trainer={"output_dir": str(folder / "out")})
    find_inference_start(config, "results.jsonl").prepare_folder(config, RunPlan({}))
    (config.trainer.folder / "results.jsonl").write_text("{}\n")
    assert list_changes(find_inference_start(config, "results.jsonl")) == []
    (folder / "helper.py").write_text("import sys\n")
    assert list_changes(find_inference_start(config, "results.jsonl")) == [("custom_reward_function.path", "applied")]


@pytest.mark.parametrize("broken", ["import", "import nothing_here\n", "\x00", "from . import other\n"])
def test_code_that_cannot_be_imported_has_a_digest(broken: str, folder: Path) -> None:
    (folder / "reward.py").write_text(broken)
    (files,) = (compute_input_digests(configure(Config, folder))[key] for key in ("custom_reward_function.path",))
    assert [Path(path).name for path, _ in files] == ["reward.py"]


def test_files_that_do_not_exist_have_no_digest(tmp_path: Path) -> None:
    assert compute_input_digests(configure(Config, tmp_path)) == {}


@pytest.mark.parametrize("position", [0, 70_000, 999_999])
def test_large_weights_are_hashed_in_blocks(position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_digests, "MAX_HASHED_BYTES", 1000)
    weights, content, digests = tmp_path / "model.safetensors", bytearray(1_000_000), set()
    changed = bytearray(content)
    changed[position] = 1
    for number, one in enumerate((content, changed, content + b"1")):
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(one)
        digests.add(digest_file(file))
    weights.write_bytes(content)
    assert len(digests) == 3 and digest_file(weights) in digests
    other = weights.rename(weights.with_suffix(".parquet"))
    assert digest_file(other) == hashlib.sha256(content).hexdigest()


def test_the_order_of_files_counts(folder: Path) -> None:
    values = configure(Config, folder).model_dump()
    pair = [str(folder / "train.jsonl"), str(folder / "second.jsonl")]
    Path(pair[1]).write_text(SHUFFLED)
    values["data"]["train_files"] = pair
    train(Config(**values), 2, position=8)
    values["data"]["train_files"] = pair[::-1]
    with pytest.raises(ValueError, match=r"data\.train_files"):
        find_start_point(Config(**values))


@pytest.mark.parametrize("entry", ["{}/data", "{}/data/*.jsonl"])
def test_folders_and_globs_are_compared_by_their_files(entry: str, folder: Path) -> None:
    data = folder / "data"
    data.mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl"):
        (data / name).write_text(ROWS)
    values = configure(Config, folder).model_dump()
    values["data"]["train_files"] = entry.format(folder)
    config = Config(**values)
    train(config, 2, position=8)
    assert list_changes(find_start_point(config)) == []
    change: list[Callable[[], object]] = [
        lambda: (data / "train-1.jsonl").write_text(SHUFFLED),
        lambda: (data / "train-2.jsonl").write_text(ROWS),
    ]
    for apply in change:
        apply()
        with pytest.raises(ValueError, match=r"data\.train_files"):
            find_start_point(config)
        (data / "train-1.jsonl").write_text(ROWS)


def test_models_of_an_evolution_have_digests(folder: Path) -> None:
    models = {"first": {"path": str(folder / "model")}, "second": {"path": str(folder / "missing")}}
    config = EvolvingConfig(data={"path": str(folder / "val.jsonl")}, models=models)
    digests = compute_input_digests(config)
    assert "data.path" in digests and [Path(path).parent for path, _ in digests["models"]] == [folder / "model"] * len(
        digests["models"]
    )
    assert digests["models"]


def test_models_of_the_hub_are_compared_by_their_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "1a"
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda hub_id, name: f"/cache/models--o--m/snapshots/{commit}/{name}"
    )
    values = configure(Config, folder).model_dump()
    values["actor_rollout_ref"]["model"]["path"] = "o/m"
    config = Config(**values)
    train(config, 2, position=8)
    assert list_changes(find_start_point(config)) == []
    commit = "2b"
    (change,) = find_start_point(config).config_changes
    assert (change.key, change.verdict) == ("actor_rollout_ref.model.path", "applied")
    assert "1a" in str(change) and "2b" in str(change)


def test_a_model_that_the_hub_does_not_have_has_no_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(hub_id: str, name: str) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    values = configure(Config, folder).model_dump()
    values["actor_rollout_ref"]["model"]["path"] = "o/m"
    assert "actor_rollout_ref.model.path" not in compute_input_digests(Config(**values))
