from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models.load import check_causal_lm, load_causal_lm


def load(path: str | Path, **settings: bool) -> torch.nn.Module:
    return load_causal_lm(Model(path=str(path), **settings), "padded")


@pytest.fixture
def broken(model_folder, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def test_no_path():
    with pytest.raises(ValueError, match=r"model.path is empty. Set model.path"):
        load("")


def test_missing_path():
    with pytest.raises(ValueError, match=r"model.path=/nowhere/model does not exist. Set it to a folder"):
        load("/nowhere/model")


def test_folder_without_config(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        load(tmp_path)


def test_unreadable_config(broken: Path):
    (broken / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read config\.json"):
        load(broken)


def test_unknown_architecture(broken: Path):
    (broken / "config.json").write_text(json.dumps({"model_type": "never_heard_of"}))
    with pytest.raises(ValueError, match=r"cannot read config\.json \(.*never_heard_of"):
        load(broken)


def test_not_a_causal_language_model(tmp_path: Path):
    from transformers import ViTConfig

    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a 'vit' model, which is not a causal language model"):
        load(tmp_path)


def test_a_reward_model_is_not_a_policy(tmp_path: Path, model_folder):
    folder = shutil.copytree(model_folder("qwen3"), tmp_path / "rm")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(ValueError, match="is a 'Qwen3ForSequenceClassification' model, which is not a causal"):
        check_causal_lm(Model(path=str(folder)))


def test_no_weights(broken: Path):
    (broken / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="its weights cannot be loaded"):
        load(broken)


def test_truncated_weights(broken: Path):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"its weights cannot be loaded .* truncated"):
        load(broken)


def test_incomplete_weights(broken: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights are missing \(1 in total\), e.g. model.layers.1.mlp.up_proj.weight"):
        load(broken)


def test_weights_of_another_shape(broken: Path):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ValueError, match="its weights cannot be loaded"):
        load(broken)


def test_shapes_only(model_folder):
    model = load_causal_lm(Model(path=str(model_folder("qwen3"))), "padded", torch.float32)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
