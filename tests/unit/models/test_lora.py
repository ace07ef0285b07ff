from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models import cpu_linear as linear
from alphaapollo.models.export import write_merged_model
from alphaapollo.models.lora import (
    gather_adapter,
    get_base_parameter_name,
    get_lora_layers,
    load_trainable_lm,
    write_adapter,
)
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.sharding import join_process_group, make_mesh, shard_model

pytest.importorskip("peft")


def load(folder: object, dtype: torch.dtype | None = None, **lora: object) -> torch.nn.Module:
    return load_trainable_lm(Model(path=str(folder), lora_rank=4, **lora), "padded", dtype, seed=0)


def test_only_the_named_layers_get_adapters(model_folder) -> None:
    model = load(model_folder("llama"), target_modules=["q_proj", "model.layers.1.mlp.up_proj"])
    assert [get_base_parameter_name(name) for name in get_lora_layers(model)] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ]


def test_alpha_scales_the_adapter(model_folder) -> None:
    model = load(model_folder("llama"), lora_alpha=6)  # of rank 4
    assert {layer.scaling["default"] for layer in get_lora_layers(model).values()} == {1.5}


def test_all_linear_is_every_linear_layer_but_the_head(model_folder) -> None:
    adapted = {get_base_parameter_name(name) for name in get_lora_layers(load(model_folder("llama")))}
    plain = load_trainable_lm(Model(path=str(model_folder("llama"))), "padded", None, seed=0).named_modules()
    linear = {f"{name}.weight" for name, module in plain if isinstance(module, torch.nn.Linear)}
    assert adapted == linear - {"lm_head.weight"}


def test_only_models_on_a_cpu_compute_with_onednn(model_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_onednn_faster", lambda: True)
    loaded = load(model_folder("qwen3"), torch.float32)
    plain = [module for module in loaded.modules() if type(module) is torch.nn.Linear]
    assert plain and not any("forward" in vars(module) for module in plain)
    join_process_group("cpu", 0, 1, "")
    try:
        load_weights = partial(PolicyModel, load(model_folder("qwen3")))
        shard_model(PolicyModel(loaded), load_weights, make_mesh("cpu"), torch.float32, offload_policy=False)
    finally:
        torch.distributed.destroy_process_group()
    assert all("forward" in vars(module) for module in plain)


def test_an_adapter_names_a_base_model_of_the_hub(model_folder, tmp_path) -> None:
    trained = load(model_folder("llama"))
    write_adapter(tmp_path, trained, dict(gather_adapter(trained)), "owner/name")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/name"
    assert "base_model: owner/name\n" in (tmp_path / "README.md").read_text()


def test_an_adapter_without_its_base_model_is_an_error(model_folder, tmp_path) -> None:
    trained = load(model_folder("llama"))
    write_adapter(tmp_path / "adapter", trained, dict(gather_adapter(trained)), "/gone")
    with pytest.raises(ValueError, match="/gone"):
        write_merged_model(tmp_path / "adapter", tmp_path / "merged")
    write_merged_model(tmp_path / "adapter", tmp_path / "merged", base_path=str(model_folder("llama")))
    assert (tmp_path / "merged" / "config.json").is_file()
