"""Problems of a model folder are found before a worker loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from alphaapollo.config.schema import Model
from alphaapollo.data.rendering import load_tokenizer
from alphaapollo.models.load import (
    INDEX,
    SINGLE,
    check_vocabulary_size,
    check_weight_files,
)
from tests.unit.tiny import save_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def configure(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        check_weight_files(Model(path=str(folder)), "model.path")
    assert str(error.value).startswith(f"model.path={folder}: ")
    return str(error.value).removeprefix(f"model.path={folder}: ")


def test_a_valid_folder(folder: Path) -> None:
    check_weight_files(Model(path=str(folder)), "model.path")


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
)
def test_quantized_weights_are_for_engines_only(folder: Path, changes: dict[str, Any], method: str) -> None:
    configure(folder, **changes)
    assert f"({method})" in refusal(folder)
    with pytest.raises(ValueError, match="quantized"):
        check_weight_files(Model(path=str(folder)), "model.path", "hf")
    check_weight_files(Model(path=str(folder)), "model.path", "vllm")


def test_quantized_weights_are_known_by_their_names(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name.replace("weight", "qweight")] = tensors.pop(name)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    assert "up_proj.qweight" in refusal(folder)
    (folder / SINGLE).unlink()
    check_weight_files(Model(path=str(folder)), "model.path")  # of another format, perhaps


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        *((SINGLE, left, SINGLE) for left in (-1, 0, 5, 100, 10_000)),  # bytes that are left
        (SINGLE, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", SINGLE),
        (INDEX, '{"weight_map": [', INDEX),
        (INDEX, '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}', "model-00001-of-00002.safetensors"),
    ],
)
def test_a_damaged_or_missing_file_is_named(folder: Path, name: str, content: str | int, named: str) -> None:
    new = content.encode() if isinstance(content, str) else (folder / name).read_bytes()[:content]
    (folder / name).write_bytes(new)
    assert refusal(folder).startswith(f"{named} is missing")


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"intermediate_size": 40}, ("model.layers.0.mlp.gate_proj.weight", "[48, 32]", "[40, 32]")),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, ("2 layers", "num_hidden_layers=1")),
        ({"hidden_size": -32}, ("no model", "config.json")),
        ({"num_hidden_layers": 7}, ("cannot read config.json", "layer_types")),
    ],
)
def test_a_configuration_that_does_not_fit(folder: Path, changes: dict[str, Any], facts: tuple[str, ...]) -> None:
    configure(folder, **changes)
    message = refusal(folder)
    for fact in facts:
        assert fact in message


def test_an_extra_layer_for_multi_token_prediction(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    more = {name.replace("layers.1.", "layers.2."): tensors[name].clone() for name in tensors if "layers.1." in name}
    save_file(tensors | more, folder / SINGLE, {"format": "pt"})
    assert "3 layers" in refusal(folder)
    configure(folder, num_nextn_predict_layers=1)
    check_weight_files(Model(path=str(folder)), "model.path")


def test_a_vocabulary_smaller_than_the_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # never in a text
    check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
    tokenizer.add_tokens(["one more"])
    with pytest.raises(ValueError, match=r"48 embeddings.* 49"):
        check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
