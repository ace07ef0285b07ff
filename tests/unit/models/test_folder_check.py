"""Problems of a model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from alphaapollo.config.schema import Model, Rollout
from alphaapollo.data.rendering import load_tokenizer
from alphaapollo.launch.model_requirements import ModelUse, find_unsupported_features
from alphaapollo.models.load import check_vocabulary_size, load_causal_lm
from tests.unit.tiny import save_model

SINGLE = "model.safetensors"


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
    model = Model(path=str(folder))
    for engine in (None, Rollout(name="hf")):
        (error,) = find_unsupported_features(ModelUse("model.path", model, engine=engine))
        assert f"({method})" in error
    assert [*find_unsupported_features(ModelUse("model.path", model, engine=Rollout()))] == []


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, ("2 layers", "num_hidden_layers=1")),
        ({"hidden_size": -32}, ("cannot read the model",)),
        ({"num_hidden_layers": 7}, ("cannot read config.json", "layer_types")),
    ],
)
def test_a_configuration_that_does_not_fit(folder: Path, changes: dict[str, Any], facts: tuple[str, ...]) -> None:
    configure(folder, **changes)
    with pytest.raises(ValueError) as error:
        load_causal_lm(Model(path=str(folder)), "padded")
    for fact in facts:
        assert fact in str(error.value)


def test_an_extra_layer_for_multi_token_prediction(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    more = {name.replace("layers.1.", "layers.2."): tensors[name].clone() for name in tensors if "layers.1." in name}
    save_file(tensors | more, folder / SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match="3 layers"):
        load_causal_lm(Model(path=str(folder)), "padded")
    configure(folder, num_nextn_predict_layers=1)
    load_causal_lm(Model(path=str(folder)), "padded")


def test_a_vocabulary_smaller_than_the_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # never in a text
    check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
    tokenizer.add_tokens(["one more"])
    with pytest.raises(ValueError, match=r"48 embeddings.* 49"):
        check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
