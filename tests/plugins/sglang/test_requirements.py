"""What SGLang cannot do is refused before a worker starts, by the rows of its engine class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import Config, Data, EngineKwargs, Model, Rollout
from alphaapollo.launch.inputs import find_local_paths
from alphaapollo.planning.model_requirements import ModelUse, find_unsupported_features
from alphaapollo.plugins.sglang.server_arguments import ARGUMENT_FILES
from tests.unit.config.overrides import from_overrides

ROLLOUT = "actor_rollout_ref.rollout"
SGLANG = Rollout(name="sglang")
ADAPTER = ("actor_rollout_ref.model.lora_rank=8", f"{ROLLOUT}.lora=adapter")
STALE = ("trainer.async_mode=carry", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis")


@pytest.fixture(autouse=True)
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python of an environment with SGLang."""
    python = tmp_path / "sglang/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    return python


def list_errors(path: Path, engine: Rollout = SGLANG, **settings: Any) -> list[str]:
    return [*find_unsupported_features(ModelUse("model.path", Model(path=str(path)), engine=engine, **settings))]


def load(*words: str) -> Config:
    needed = ("actor_rollout_ref.model.path=some/model", "data.train_files=rows.jsonl", f"{ROLLOUT}.name=sglang")
    return from_overrides(Config, *needed, *words)


def check(*words: str, num_gpus: int = 0) -> list[str]:
    return check_config_and_get_notices(load(*words), num_gpus, 8)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ((f"{ROLLOUT}.tensor_model_parallel_size=2",), "name=sglang tensor_model_parallel_size=2 1."),
        ((*ADAPTER, *STALE), "name=sglang lora=adapter trainer.max_staleness=1 name=vllm merged."),
    ],
)
def test_combinations_that_sglang_cannot_do(words: tuple[str, ...], facts: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(*words)
    (error,) = refused.value.errors
    assert [fact for fact in facts.split() if fact not in error] == [], error


@pytest.mark.parametrize("words", [ADAPTER, STALE])
def test_combinations_that_sglang_can_do(words: tuple[str, ...]) -> None:
    assert check(*words) == []


def test_gpus_are_a_warning() -> None:
    assert [line for line in check(num_gpus=1) if f"{ROLLOUT}.name=sglang" in line and "GPU" in line]


def test_every_node_needs_the_environment(python: Path) -> None:
    assert find_local_paths(load())[f"{ROLLOUT}.name"] == str(python)


def test_missing_environment_is_one_error(model_folder: Any, python: Path) -> None:
    assert list_errors(model_folder("qwen3")) == []
    python.unlink()
    (error,) = list_errors(model_folder("qwen3"))
    assert error.startswith("rollout.name=sglang: ") and error.endswith("Run `make setup-sglang`.")


def test_context_length_and_images(model_folder: Any, vision_folder: Any) -> None:
    lengths = Data(max_prompt_length=101, max_response_length=28)  # the context: 128 tokens
    (error,) = list_errors(model_folder("qwen3"), lengths=lengths)
    assert "max_prompt_length=101" in error and "129" in error and "128" in error
    (error,) = list_errors(vision_folder("qwen3_vl"))
    assert error.startswith("rollout.name=sglang: ") and "rollout.name=vllm" in error


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("context_length", "other keys set it"),
        *(
            (name, "with it, tokens are sampled from another distribution")
            for name in ("watermark_key", "dllm_algorithm")
        ),
        ("speculative_algorithm", "with it, tokens are sampled from another"),
        ("schedule", "sglang has no such argument"),
    ],
)
def test_refused_arguments(model_folder: Any, tmp_path: Path, key: str, reason: str) -> None:
    fields = tmp_path / ARGUMENT_FILES.replace("*", "x")
    fields.parent.mkdir(parents=True)
    fields.write_text("class Schedule:\n    schedule_policy: str = 'fcfs'\n")

    def list_errors_with(*keys: str) -> list[str]:
        engine = Rollout(name="sglang", engine_kwargs=EngineKwargs(sglang=dict.fromkeys(keys, 1)))
        return list_errors(model_folder("qwen3"), engine)

    (error,) = list_errors_with("schedule-policy", key)
    assert error.startswith(f"rollout.engine_kwargs.sglang.{key}: {reason}")
    assert list_errors_with("schedule-policy") == []


@pytest.mark.parametrize("tied", [True, False])
def test_tied_experts(model_folder: Any, tmp_path: Path, tied: bool) -> None:
    """SGLang would sample with an output head that is not loaded."""
    config = json.loads((model_folder("qwen3_moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    errors = list_errors(tmp_path)
    assert [error.startswith("rollout.name=sglang: ") and "tied" in error for error in errors] == [True] * tied


@pytest.mark.parametrize(("factor", "is_refused"), [(1.0, False), (1.5, True)])
def test_output_head_that_differs_from_the_embedding(
    model_folder: Any, tmp_path: Path, factor: float, is_refused: bool
) -> None:
    source = model_folder("qwen3")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = load_file(source / "model.safetensors")
    head = factor * tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert any(" head " in message for message in list_errors(tmp_path)) is is_refused
