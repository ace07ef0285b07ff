from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.build import build_config
from alphaapollo.config.check import list_model_paths
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import merge_maps
from alphaapollo.config.load import save_config
from alphaapollo.config.schema import Config, GenerationConfig, SftConfig
from alphaapollo.runs.checkpoint_folder import write_progress
from alphaapollo.runs.newest_model import (
    RunModel,
    find_newest_model,
    load_run_model,
    make_generation_config_values,
    resolve_model_paths,
)


def model(folder: Path, when: float | None = None, name: str = "config.json") -> Path:
    folder.mkdir(parents=True)
    (folder / name).write_text("{}")
    if when is not None:
        os.utime(folder, (when, when))
    return folder


def checkpoint(run: Path, step: int, when: float) -> Path:
    folder = run / f"checkpoints/step_{step:06d}"
    folder.mkdir(parents=True)
    write_progress(folder, {"step": step})
    os.utime(folder / "progress.json", (when, when))
    return folder


def test_the_newest_of_a_run(tmp_path: Path) -> None:
    first = checkpoint(tmp_path, 1, when=100)
    assert find_newest_model(tmp_path) == RunModel(tmp_path, tmp_path / "exported/step_000001", first)
    model(tmp_path / "exported/step_000001")
    assert find_newest_model(tmp_path) == RunModel(tmp_path, tmp_path / "exported/step_000001")
    model(tmp_path / "model", when=200)
    assert find_newest_model(tmp_path) == RunModel(tmp_path, tmp_path / "model")
    second = checkpoint(tmp_path, 2, when=300)  # the run went on after it had ended
    assert find_newest_model(tmp_path) == RunModel(tmp_path, tmp_path / "exported/step_000002", second)
    assert find_newest_model(first) == RunModel(tmp_path, tmp_path / "exported/step_000001")
    (second / "progress.json").unlink()  # which is newer is unknown; the export reports the damage
    assert find_newest_model(tmp_path) == RunModel(tmp_path, tmp_path / "exported/step_000002", second)


@pytest.mark.parametrize(
    ("written", "sampling"),
    [
        (None, (0.0, 1.0, -1)),
        ('{"eos_token_id": 1, "temperature": 0.9}', (0.0, 1.0, -1)),  # without do_sample
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20}', (0.6, 0.9, 20)),
    ],
)
def test_a_model_of_no_run_samples_as_its_folder_says(
    tmp_path: Path, written: str | None, sampling: tuple[float, float, int]
) -> None:
    folder = model(tmp_path / "model")
    if written:
        (folder / "generation_config.json").write_text(written)
    values = make_generation_config_values(RunModel(folder, folder))
    rollout = build_config(GenerationConfig, values | {"data": {"path": "x"}}).rollout
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == sampling


def test_a_models_folder_knows_its_run(tmp_path: Path) -> None:
    own = model(tmp_path / "run/model")
    assert find_newest_model(own) == RunModel(own, own)
    save_config(SftConfig(), tmp_path / "run/config.yaml")
    assert find_newest_model(own).run_folder == tmp_path / "run"
    exported = model(tmp_path / "run/exported/step_000001")
    assert find_newest_model(exported) == RunModel(tmp_path / "run", exported)
    elsewhere = model(tmp_path / "run/model/inner")
    assert find_newest_model(elsewhere).run_folder == elsewhere


def test_a_run_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model and no complete checkpoint yet. A run writes"):
        find_newest_model(tmp_path)
    with pytest.raises(ValueError, match=r"gone is not a folder"):
        find_newest_model(tmp_path / "gone")
    save_config(SftConfig(), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"^model\.path="):
        resolve_model_paths(SftConfig(model={"path": str(tmp_path)}))


def test_an_adapter_is_merged_once_for_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_config(SftConfig(), tmp_path / "run/config.yaml")
    adapter = model(tmp_path / "run/model", name="adapter_config.json")
    first = find_newest_model(tmp_path / "run")
    assert (first.run_folder, first.source) == (tmp_path / "run", adapter)
    model(first.model_folder)
    assert find_newest_model(adapter) == RunModel(tmp_path / "run", first.model_folder)
    (adapter / "adapter_model.safetensors").write_bytes(b"other weights")
    assert find_newest_model(adapter).model_folder != first.model_folder
    alone = model(tmp_path / "alone", name="adapter_config.json")
    assert find_newest_model(alone).run_folder == find_newest_model(alone).model_folder


ROLE = {"model": {"path": "PATH"}}
TEACHER = {"models": {"one": {"path": "PATH"}}, "by_source": {"*": "one"}}


@pytest.mark.parametrize(
    ("schema", "values", "keys"),
    [
        (SftConfig, ROLE, ["model.path"]),
        (Config, {"actor_rollout_ref": ROLE, "critic": ROLE}, ["actor_rollout_ref.model.path", "critic.model.path"]),
        (Config, {"teacher": TEACHER}, ["teacher.models.one.path"]),
    ],
)
@pytest.mark.parametrize("kind", ["run", "run/checkpoints/step_000002", "run/exported/step_000002", "other", "org/hub"])
def test_every_command_takes_what_the_product_writes(tmp_path: Path, monkeypatch, schema, values, keys, kind) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "run", 2, when=100)
    exported = model(tmp_path / "run/exported/step_000002")
    (tmp_path / "other").mkdir()
    save_config(SftConfig(), tmp_path / "config.yaml")  # the working folder is a run, but an empty path is none
    config = schema(**json.loads(json.dumps(values).replace("PATH", kind)))
    resolved = resolve_model_paths(config)
    expected = str(exported) if kind.startswith("run") and "exported" not in kind else kind
    found = {key: path for key, path in list_model_paths(resolved) if path}
    assert found == dict.fromkeys(keys, expected)


def configure_generation(folder: Path, config: Any) -> GenerationConfig:
    """Configuration of an evaluation of the model of a run with the configuration `config`."""
    save_config(config, folder / "config.yaml")
    newest = RunModel(folder, model(folder / "model"))
    assert find_newest_model(folder) == newest
    values = GenerationConfig().model_dump(mode="json")
    merge_maps(values, make_generation_config_values(newest))
    return build_config(GenerationConfig, values)


def test_it_plays_as_in_its_run(tmp_path: Path) -> None:
    role = {"model": {"path": "base", "lora_rank": 8}, "rollout": {"temperature": 0.7, "num_engines": 4}}
    role["rollout"]["gpu_memory_utilization"] = 0.4
    env = {"env_name": "informal_math", "max_steps": 5}
    config = configure_generation(tmp_path, Config(actor_rollout_ref=role, env=env, data={"max_response_length": 99}))
    assert (config.model.path, config.model.lora_rank) == (str(tmp_path / "model"), 0)
    assert (config.rollout.temperature, config.rollout.num_engines) == (0.7, 1)
    assert config.rollout.gpu_memory_utilization == 0.9  # no trainer beside it
    assert (config.env.env_name, config.env.max_steps, config.data.max_response_length) == ("informal_math", 5, 99)
    assert config.trainer.controller == "local"
    tuned = configure_generation(tmp_path / "tuned", SftConfig(model={"path": "base", "trust_remote_code": True}))
    assert tuned.model.trust_remote_code and tuned.env.env_name == "single_turn"


SERVERS = {"files": {"command": ["sh", "-c", "touch 'a b'"]}}


@pytest.mark.parametrize(
    ("section", "asked"),
    [
        ({"env": {"env_name": "agent", "agent": {"command": "touch x"}}}, "env.agent.command='touch x'"),
        ({"env": {"mcp_servers": SERVERS, "custom_module": "x.py"}}, "env.custom_module='x.py'"),
        ({"actor_rollout_ref": {"model": {"trust_remote_code": True}}}, "model.trust_remote_code=true"),
        (
            {"actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {"logits_processors": ["evil:Class"]}}}}},
            "rollout.engine_kwargs.vllm={logits_processors:['evil:Class']}",
        ),
    ],
)
def test_code_that_a_folder_names_needs_the_command_line(tmp_path: Path, section: dict, asked: str) -> None:
    """The error's words are all that it takes, and each of them."""
    save_config(Config(**section), tmp_path / "run/config.yaml")
    model(tmp_path / "run/model")
    with pytest.raises(ConfigError) as refused:
        load_run_model(str(tmp_path / "run"), [])
    words = shlex.split(str(refused.value).partition(" add ")[2])
    assert asked in words
    config = load_run_model(str(tmp_path / "run"), words)[1]
    assert load_run_model(str(tmp_path / "run"), [*words, "trainer.seed=1"])[1].env == config.env
    for word in words:
        with pytest.raises(ConfigError, match=word.partition("=")[0]):
            load_run_model(str(tmp_path / "run"), [other for other in words if other != word])
    others = {"env.mcp_servers": "{other:{url:y}}"}  # is merged with the folder's
    for key in {word.partition("=")[0] for word in words} & others.keys():
        with pytest.raises(ConfigError, match=r"touch"):
            load_run_model(
                str(tmp_path / "run"), [w for w in words if not w.startswith(key)] + [f"{key}={others[key]}"]
            )
