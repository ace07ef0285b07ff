from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ViTConfig

from alphaapollo.config.schema import Model
from alphaapollo.models.load import load_causal_lm


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda folder: (folder / "config.json").unlink(), "no such folder"),
        (lambda folder: (folder / "config.json").write_text("{"), r"cannot read config\.json"),
        (configure(model_type="never_heard_of"), r"config\.json \(.*never_heard_of"),
        (lambda folder: ViTConfig().save_pretrained(folder), "is a 'vit' model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot read the model"),
        (drop_a_tensor, r"1 in total.* model\.layers\.1\.mlp\.up_proj\.weight"),
        (configure(intermediate_size=64), "cannot read the model"),
    ],
)
def test_a_damaged_folder_is_an_error(model_folder, tmp_path: Path, damage: Callable[[Path], object], fact: str):
    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))
    damage(folder)
    with pytest.raises(ValueError, match=rf"model\.path={folder}.*{fact}"):
        load_causal_lm(Model(path=str(folder)), "padded")


def test_an_empty_path_is_an_error():
    with pytest.raises(ValueError, match=r"model\.path=empty"):
        load_causal_lm(Model(path=""), "padded")


def test_shapes_only(model_folder):
    model = load_causal_lm(Model(path=str(model_folder("qwen3"))), "padded", torch.float32)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
