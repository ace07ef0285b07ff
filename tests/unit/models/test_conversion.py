"""Adapters of peft and checkpoints of verl become folders with the same outputs, or an error with the difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from alphaapollo.cli.main import main
from alphaapollo.models.export import write_merged_model, write_verl_model
from alphaapollo.runs.newest_model import find_newest_model
from alphaapollo.utils.hub import find_verl_shards

peft = pytest.importorskip("peft")
TOKENS = torch.arange(2, 40)[None]
LINEAR = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def bases(model_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of models with tied and untied output heads."""
    folders = {}
    for tied in (True, False):
        torch.manual_seed(0)
        sizes = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0}
        folders[tied] = tmp_path_factory.mktemp("base")
        shutil.copytree(model_folder("llama"), folders[tied], dirs_exist_ok=True)
        LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).save_pretrained(folders[tied])
    return folders


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS).logits.float().log_softmax(-1)


def save_adapter(base: Path, folder: Path, config: Any, size: int = 272) -> torch.Tensor:
    """Save an adapter with random weights, and return the outputs of the model with it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(size)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(folder)
    return outputs(adapted)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ({"use_rslora": True}, 272),
        ({"use_dora": True}, 272),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}}, 272),
        ({"modules_to_save": ["lm_head"]}, 272),
        ({"modules_to_save": ["embed_tokens"]}, 272),
        ({"trainable_token_indices": [5, 9]}, 272),
        ({}, 280),
    ],
)
def test_adapters_are_merged_exactly(bases: Any, tmp_path: Path, kind: Any, size: int, tied: bool) -> None:
    expected = save_adapter(bases[tied], tmp_path / "a", peft.LoraConfig(r=4, target_modules=LINEAR, **kind), size)
    write_merged_model(tmp_path / "a", tmp_path / "merged")
    found = outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens"]), r"differ from the original's by \d\.\de"),
        (lambda: peft.LoraConfig(r=4, target_modules=["lm_head"]), r"differ from the original's by \d\.\de"),
        (lambda: peft.LoraConfig(r=4, target_modules=LINEAR, alora_invocation_tokens=[5]), "does not support merging"),
        (lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "cannot be merged into"),
    ],
)
def test_other_adapters_are_refused(bases: Any, tmp_path: Path, config: Any, reason: str) -> None:
    """Tied embeddings have one weight, of which only one use is adapted."""
    save_adapter(bases[True], tmp_path / "a", config())
    with pytest.raises(ValueError, match=reason):
        write_merged_model(tmp_path / "a", tmp_path / "merged")


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "modules_to_save", "rank_pattern"])
@pytest.mark.parametrize("pattern", [r"(\w+\.?)*!", "("])
def test_regular_expressions_of_an_adapter_are_limited(
    bases: Any, tmp_path: Path, key: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphaapollo.models.lora.PATTERN_SECONDS", 0.2)
    save_adapter(bases[True], tmp_path / "a", peft.LoraConfig(r=4, target_modules=LINEAR))
    file = tmp_path / "a/adapter_config.json"
    value = {"modules_to_save": [pattern], "rank_pattern": {pattern: 2}}.get(key, pattern)
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=r"adapter_config\.json has the regular expression"):
        write_merged_model(tmp_path / "a", tmp_path / "merged")


def test_the_command_takes_an_adapter(bases: Any, tmp_path: Path) -> None:
    save_adapter(bases[False], tmp_path / "a", peft.LoraConfig(r=4, target_modules=LINEAR))
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "one")]) == 0
    assert main(["export", f"checkpoint={tmp_path / 'a'}", f"output={tmp_path / 'other'}"]) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert all(torch.equal(other[name], weight) for name, weight in one.items())
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "one")]) == 2  # it exists


def write_shards(base: Path, folder: Path, mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Save the weights of a model as verl's ranks do: rank R has its part of each tensor's first dimension."""
    shutil.copytree(base, folder / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    weights = AutoModelForCausalLM.from_pretrained(base).state_dict()
    size = int(torch.tensor(mesh_shape).prod())
    if dist.is_initialized():  # by a run of an earlier test in this process
        dist.destroy_process_group()
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ddp", "fsdp")[-len(mesh_shape) :])
            where = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
            state = {}
            for name, weight in weights.items():
                parts = [*weight.chunk(mesh_shape[-1]), *[weight[:0]] * mesh_shape[-1]]
                part = parts[rank % mesh_shape[-1]].clone()
                state[name] = DTensor.from_local(part, mesh, where, shape=weight.shape, stride=weight.stride())
            torch.save(state, folder / f"model_world_size_{size}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return weights


@pytest.mark.parametrize(("mesh", "tied"), [((3,), False), ((2, 2), True)])
def test_shards_of_verl_are_joined(bases: Any, tmp_path: Path, mesh: tuple[int, ...], tied: bool) -> None:
    weights = write_shards(bases[tied], tmp_path / "actor", mesh)
    assert find_newest_model(tmp_path / "actor").source == tmp_path / "actor"
    shards = find_verl_shards(tmp_path / "actor")
    assert main(["export", str(tmp_path / "actor"), str(tmp_path / "out")]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert weights.keys() - written.keys() <= {"lm_head.weight"}
    assert [name for name in written if not torch.equal(written[name], weights[name])] == []
    found, expected = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", bases[tied]))
    assert torch.equal(outputs(found), outputs(expected))
    shards.pop().write_bytes(b"damaged")
    for files, reason in (
        (shards, "shards exist"),
        (find_verl_shards(tmp_path / "actor"), "cannot be converted: Weights only load failed.*python -m verl"),
    ):
        with pytest.raises(ValueError, match=reason):
            write_verl_model(files, tmp_path / "other")
