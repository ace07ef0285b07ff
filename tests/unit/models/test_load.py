"""Model folders that cannot be used, and why."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ViTConfig

from alphaapollo.config.schema import Fsdp, Model, Rollout
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.models.load import check_vocabulary_size, check_weight_files, load_causal_lm, load_config
from alphaapollo.planning.model_requirements import ModelUse, check_models, find_unsupported_features
from tests.quantized import make_section


@pytest.fixture
def folder(model_folder, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(model_folder("qwen3"), tmp_path / "model"))


def change_tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = change(load_file(folder / "model.safetensors"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return write


BIAS = {"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}


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
        (
            change_tensors(lambda all: {name: one for name, one in all.items() if "1.mlp.up" not in name}),
            r"1 in total.* model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (change_tensors(lambda all: {f"_orig_mod.{name}": one for name, one in all.items()}), "'_orig_mod.'"),
        (
            change_tensors(lambda all: {name.replace("s.1.", "s.1.inner."): one for name, one in all.items()}),
            "'inner.'",
        ),
        (change_tensors(lambda all: all | BIAS), r"1 tensors .*\.q_proj\.bias"),
        (configure(intermediate_size=64), "cannot read the model"),
        (configure(hidden_size=-32), "cannot read the model"),
        (configure(num_hidden_layers=7), r"cannot read config\.json.*layer_types"),
        (configure(num_hidden_layers=1, layer_types=["full_attention"]), "2 layers.*num_hidden_layers=1"),
    ],
)
def test_a_damaged_folder_is_an_error(folder: Path, damage: Callable[[Path], object], fact: str):
    damage(folder)
    with pytest.raises(ValueError, match=rf"model\.path={folder}.*{fact}"):
        load_causal_lm(Model(path=str(folder)), "padded")
    if (folder / "model.safetensors").is_file():  # found from headers, before a worker starts
        with pytest.raises(ValueError, match=rf"model\.path={folder}.*{fact}"):
            check_weight_files(Model(path=str(folder)))


def test_tensors_outside_the_layers_are_named(folder: Path):
    change_tensors(lambda all: all | {"v_head.summary.weight": torch.ones(1, 64)})(folder)
    (notice,) = check_models([ModelUse("model.path", Model(path=str(folder)))])
    assert f"model.path={folder}" in notice
    assert "v_head.summary.weight" in notice


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_engines_load_the_head_or_refuse_the_folder(folder: Path, factor: float):
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    use = ModelUse("model.path", Model(path=str(folder)), engine=Rollout())
    change_tensors(lambda all: all | {head: factor * all[embedding]})(folder)
    assert not any(" head " in message for message in find_unsupported_features(use))
    assert load_config(use.model).tie_word_embeddings is (factor == 1)
    change_tensors(lambda all: {name: one for name, one in all.items() if name != embedding})(folder)
    assert any("no embedding" in message for message in find_unsupported_features(use))


def test_an_empty_path_is_an_error():
    with pytest.raises(ValueError, match=r"model\.path=empty"):
        load_causal_lm(Model(path=""), "padded")


def test_shapes_only(model_folder):
    model = load_causal_lm(Model(path=str(model_folder("qwen3"))), "padded", torch.float32)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


CT = "compressed-tensors"


def describe_weights(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": make_section(**changes)}


@pytest.mark.parametrize(
    ("changes", "method", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq", ""),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq", ""),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes", ""),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config", ""),
        ({"compression_config": {"quant_method": CT}}, CT, " with 0 groups of layers)"),
        (describe_weights(symmetric=False), CT, " with zero points)"),
        (describe_weights(num_bits=8), CT, " with weights of 8 bits (int, one scale per group))"),
        (describe_weights(strategy="channel"), CT, " with weights of 4 bits (int, one scale per channel))"),
        (describe_weights(actorder="group"), CT, " with groups in the order of activations)"),
        ({"quantization_config": make_section() | {"format": "marlin-24"}}, CT, " with the format marlin-24)"),
        ({"quantization_config": make_section() | {"kv_cache_scheme": {"num_bits": 8}}}, CT, " with a quantized KV"),
        (describe_weights() | {"num_experts": 4, "num_experts_per_tok": 2}, CT, " with experts)"),
    ],
)
def test_quantized_weights_are_for_engines_only(
    folder: Path, changes: dict[str, Any], method: str, reason: str
) -> None:
    configure(**changes)(folder)
    model = Model(path=str(folder))
    (error,) = find_unsupported_features(ModelUse("model.path", model))
    assert f"({method}{reason or ')'}" in error
    (error,) = find_unsupported_features(ModelUse("model.path", model, engine=Rollout(name="hf")))
    assert f"({method})" in error
    assert [*find_unsupported_features(ModelUse("model.path", model, engine=Rollout()))] == []
    with pytest.raises(ValueError, match=re.escape(f"({method}{reason or ')'}")):
        load_causal_lm(model, "padded")


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"fsdp": Fsdp()}, "model.lora_rank=0: 4 bits Set model.lora_rank"),
        ({"fsdp": Fsdp(), "model": {"lora_rank": 4}}, ""),
        ({"fsdp": Fsdp(), "model": {"lora_rank": 4}, "engine": Rollout()}, "rollout.lora=merged: 4 bits lora=adapter"),
        ({"fsdp": Fsdp(), "model": {"lora_rank": 4}, "engine": Rollout(lora="adapter")}, ""),
        ({}, ""),  # e.g. a teacher
    ],
)
def test_weights_of_4_bits_are_frozen(folder: Path, settings: dict[str, Any], facts: str) -> None:
    configure(**describe_weights())(folder)
    settings = {"model": {}} | settings
    model = Model(path=str(folder), **settings.pop("model"))
    errors = [*find_unsupported_features(ModelUse("model.path", model, **settings))]
    assert len(errors) == bool(facts)
    assert [fact for fact in facts.split() if fact not in errors[0]] == []


def test_an_extra_layer_for_multi_token_prediction(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    more = {name.replace("layers.1.", "layers.2."): tensors[name].clone() for name in tensors if "layers.1." in name}
    save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="3 layers"):
        load_causal_lm(Model(path=str(folder)), "padded")
    configure(num_nextn_predict_layers=1)(folder)
    load_causal_lm(Model(path=str(folder)), "padded")


def test_a_vocabulary_smaller_than_the_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # never in a text
    check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
    tokenizer.add_tokens(["one more"])
    with pytest.raises(ValueError, match=r"48 embeddings.* 49"):
        check_vocabulary_size(Model(path=str(folder)), tokenizer, "model.path")
