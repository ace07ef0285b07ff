"""Digests of data, code and models: what a resumed run does if their content has changed."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from alphaapollo.config.schema import Config, GenerationConfig, SftConfig
from alphaapollo.runs import input_digests, resume
from alphaapollo.runs.checkpoint_folder import read_inputs
from alphaapollo.runs.input_digests import compute_input_digests, digest_file
from alphaapollo.runs.resume import StartPoint, find_inference_start, find_start_point
from alphaapollo.runs.run_plan import RunPlan, read_run_plan
from tests.unit.run_folders import change_keys, make_config, train

ROWS = '{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "2 + 2?", "answer": "4"}\n'
SHUFFLED = "".join(reversed(ROWS.splitlines(keepends=True)))
FILES = {  # of the inputs of a run
    "train.jsonl": ROWS,
    "val.jsonl": ROWS,
    "reward.py": "import helper\n",
    "helper.py": "import os\n",
    "environment.py": "",
    "model/config.json": "{}",
    "model/tokenizer_config.json": "{}",
    "model/tokenizer.json": "{}",
    "model/chat_template.jinja": "{{ messages }}",
    "model/model.safetensors": "\x00" * 1000,
}
MODEL = "actor_rollout_ref.model.path"
OTHER_DATA = {"trainer.resume_with_other_data": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def configure(schema: type[Any], folder: Path) -> Any:
    values: dict[str, Any] = {
        "data": {"train_files": str(folder / "train.jsonl"), "val_files": [str(folder / "val.jsonl")]}
    }
    model = {"model": {"path": str(folder / "model")}}
    if schema is not Config:
        return make_config(folder / "out", schema, **values, **model)
    code = {"custom_reward_function": {"path": str(folder / "reward.py")}}
    values |= code | {"env": {"custom_module": str(folder / "environment.py")}, "actor_rollout_ref": model}
    return make_config(folder / "out", **values)


@pytest.fixture
def config(folder: Path) -> Config:
    return configure(Config, folder)


@pytest.fixture
def checkpoint(config: Config) -> Path:
    """Checkpoint of a run with the configuration `config`."""
    return train(config, 2, prompts_consumed=8)


def list_changes(start: StartPoint) -> list[tuple[str, str]]:
    return [(change.key, change.verdict) for change in start.config_changes]


@pytest.mark.parametrize(("schema", "position"), [(Config, "prompts_consumed"), (SftConfig, "examples_consumed")])
def test_changed_training_data_is_refused_unless_a_key_allows_it(
    schema: type[Any], position: str, folder: Path
) -> None:
    config = configure(schema, folder)
    train(config, 2, **{position: 8})
    (folder / "train.jsonl").write_text(SHUFFLED)
    with pytest.raises(ValueError, match=r"data\.train_files=.*train\.jsonl.*resume_with_other_data=true"):
        find_start_point(config)
    allowed = change_keys(config, OTHER_DATA)
    start = find_start_point(allowed)
    assert list_changes(start) == [("data.train_files", "applied")]
    assert start.has_other_data and start.inputs.data_start == 8
    assert len(start.describe()) == 3  # resumes, the file, the new order
    train(allowed, 4, **{position: 16})
    start = find_start_point(config)
    assert list_changes(start) == [] and start.inputs.data_start == 8, "the order continues in the next resume"


def test_the_key_also_allows_another_file_and_nothing_else(config: Config, checkpoint: Path, folder: Path) -> None:
    (folder / "other.jsonl").write_text(ROWS + ROWS)
    before = find_start_point(config).inputs.digests
    assert list_changes(find_start_point(config, before)) == [], "a restart compares the data that the run has read"
    other = change_keys(config, {"data.train_files": str(folder / "other.jsonl")})
    with pytest.raises(ValueError, match=r"data\.train_files"):
        find_start_point(other)
    with pytest.raises(ValueError, match=r"env\.env_name"):
        find_start_point(change_keys(other, OTHER_DATA | {"env.env_name": "other"}))
    assert find_start_point(change_keys(other, OTHER_DATA)).inputs.data_start == 8


def test_weights_that_were_passes_do_not_become_shares(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = change_keys(config, {"data.source_weights": [1.0]})
    train(config, 2, prompts_consumed=8)
    assert list_changes(find_start_point(config)) == []
    monkeypatch.setattr(resume, "read_inputs", lambda path: replace(read_inputs(path), weights_are_shares=False))
    with pytest.raises(ValueError, match=r"source_weights=\[1.0\] were passes .*resume_with_other_data=true"):
        find_start_point(config)
    assert find_start_point(change_keys(config, OTHER_DATA)).step == 2
    changed = find_start_point(change_keys(config, {"data.source_weights": [0.999]}))
    assert list_changes(changed) == [("data.source_weights", "applied")] and changed.inputs.weights_are_shares


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("val.jsonl", "data.val_files"),
        ("helper.py", "custom_reward_function.path"),
        ("environment.py", "env.custom_module"),
        *((f"model/{name}", MODEL) for name in ("chat_template.jinja", "tokenizer_config.json", "config.json")),
        ("model/model.safetensors", MODEL),
    ],
)
def test_other_changes_of_content_are_notices(
    name: str, key: str, config: Config, checkpoint: Path, folder: Path
) -> None:
    file = folder / name
    file.write_bytes(file.read_bytes() + b"\n")
    start = find_start_point(config)
    assert list_changes(start) == [(key, "applied")] and not start.has_other_data
    (line,) = [line for line in start.describe() if key in line]
    assert file.name in line and "applied" in line


def test_files_of_the_same_content_may_move(config: Config, checkpoint: Path, folder: Path) -> None:
    moved = folder / "moved"
    moved.mkdir()
    for name in {name.partition("/")[0] for name in FILES}:
        (folder / name).rename(moved / name)
    config = configure(Config, moved).model_copy(update={"trainer": config.trainer})
    start = find_start_point(config)
    assert start.describe() == [f"resumes from {checkpoint}."] and start.inputs.data_start == 0
    start.prepare_folder(config, RunPlan({}))
    assert (config.trainer.folder / "config.1.yaml").is_file(), "the newest configuration has the new paths"


def test_digests_are_in_the_checkpoint_and_in_the_plan(config: Config, checkpoint: Path) -> None:
    digests, plan = compute_input_digests(config), read_run_plan(config.trainer.folder)
    assert plan and read_inputs(checkpoint).digests == plan.inputs == digests
    model = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert {key: [Path(path).name for path, _ in files] for key, files in digests.items()} == {
        "data.train_files": ["train.jsonl"],
        "data.val_files": ["val.jsonl"],
        "custom_reward_function.path": ["reward.py", "helper.py"],
        "env.custom_module": ["environment.py"],
        MODEL: model,
    }


def test_generation_reports_changes_since_its_plan(folder: Path) -> None:
    values: dict[str, Any] = {"data": {"path": str(folder / "val.jsonl")}, "model": {"path": str(folder / "model")}}
    values["custom_reward_function"] = {"path": str(folder / "reward.py")}
    config = make_config(folder / "out", GenerationConfig, **values)
    find_inference_start(config, "results.jsonl").prepare_folder(config, RunPlan({}))
    (config.trainer.folder / "results.jsonl").write_text("{}\n")
    assert list_changes(find_inference_start(config, "results.jsonl")) == []
    (folder / "helper.py").write_text("import sys\n")
    assert list_changes(find_inference_start(config, "results.jsonl")) == [("custom_reward_function.path", "applied")]


@pytest.mark.parametrize("broken", ["import", "import nothing_here\n", "\x00", "from . import other\n"])
def test_code_that_cannot_be_imported_has_a_digest(broken: str, config: Config, folder: Path) -> None:
    (folder / "reward.py").write_text(broken)
    files = compute_input_digests(config)["custom_reward_function.path"]
    assert [Path(path).name for path, _ in files] == ["reward.py"]
    (folder / "graders").mkdir()
    (folder / "graders" / "words.py").write_text("import counts\n")
    (folder / "counts.py").write_text("")
    (folder / "reward.py").write_text("from graders import words\n")
    files = compute_input_digests(config)["custom_reward_function.path"]
    assert [Path(path).name for path, _ in files] == ["reward.py", "counts.py", "words.py"], "a package without init"


@pytest.mark.parametrize("position", [0, 70_000, 999_999])
def test_large_weights_are_hashed_in_blocks(position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_digests, "MAX_HASHED_BYTES", 1000)
    content = bytes(1_000_000)
    changed = content[:position] + b"1" + content[position + 1 :]

    def digest(written: bytes, name: str) -> str:
        (tmp_path / name).write_bytes(written)
        return digest_file(tmp_path / name)

    digests = [digest(one, f"{at}.safetensors") for at, one in enumerate((content, changed, content + b"1"))]
    assert len({*digests}) == 3 and digest(content, "model.safetensors") == digests[0]
    assert digest(content, "model.parquet") == hashlib.sha256(content).hexdigest()


PAIR, FOLDER, GLOB = ["data/0.jsonl", "data/1.jsonl"], ["data"], ["data/*.jsonl"]


@pytest.mark.parametrize(
    ("before", "after", "written"),
    [
        (PAIR, PAIR[::-1], {}),
        *((files, files, {"data/1.jsonl": SHUFFLED}) for files in (FOLDER, GLOB)),
        *((files, files, {"data/2.jsonl": ROWS}) for files in (FOLDER, GLOB)),
    ],
)
def test_folders_globs_and_the_order_of_files_count(
    before: list[str], after: list[str], written: dict[str, str], config: Config, folder: Path
) -> None:
    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (folder / name).write_text(text)

    def configure_files(names: list[str]) -> Config:
        return change_keys(config, {"data.train_files": [str(folder / name) for name in names]})

    (folder / "data").mkdir()
    write({"data/0.jsonl": ROWS, "data/1.jsonl": ROWS + ROWS})
    train(configure_files(before), 2, prompts_consumed=8)
    assert list_changes(find_start_point(configure_files(before))) == []
    write(written)
    with pytest.raises(ValueError, match=r"data\.train_files"):
        find_start_point(configure_files(after))


def test_models_of_the_hub_are_compared_by_their_commit(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {"o/m": "1a"}

    def find_file(hub_id: str, name: str) -> str:
        if hub_id not in commits:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")
        return f"/cache/models--o--m/snapshots/{commits[hub_id]}/{name}"

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", find_file)
    config = change_keys(config, {MODEL: "o/m"})
    train(config, 2, prompts_consumed=8)
    assert list_changes(find_start_point(config)) == []
    commits["o/m"] = "2b"
    (change,) = find_start_point(config).config_changes
    assert (change.key, change.verdict) == (MODEL, "applied")
    assert "1a" in str(change) and "2b" in str(change)
    commits.clear()
    assert MODEL not in compute_input_digests(config)
