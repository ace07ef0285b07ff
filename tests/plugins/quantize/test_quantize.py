"""Tiny models are written with weights of 4 bits, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphaapollo.cli.main import main
from alphaapollo.models.quantized import dequantize
from alphaapollo.plugins.quantize.rounding import round_to_groups
from alphaapollo.plugins.quantize.write import pack_layer
from tests.unit import tiny


def save_model(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "llama") -> Path:
    monkeypatch.setitem(tiny.SHAPE, "intermediate_size", 64)
    tiny.save_model(name, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save_pretrained(folder)
    return folder


def test_weights_are_rounded_to_multiples_of_a_scale_per_group() -> None:
    codes, scales = round_to_groups(
        torch.tensor([[3.5, -0.9, 0.2, 0.3, 0.0, 0.0, 0.0, 0.0], [-7, 0, 2, 1, 14, 0, 1, 2.9]]), 4
    )
    assert scales.tolist()[1] == [1.0, 2.0] and scales[0, 0] == 0.5
    assert codes.tolist() == [[7, -2, 0, 1, 0, 0, 0, 0], [-7, 0, 2, 1, 7, 0, 0, 1]]
    packed = pack_layer("layer", codes, scales)["layer.weight_packed"].view(torch.uint8)
    assert dequantize(packed, scales, torch.float32)[1].tolist() == [-7, 0, 2, 1, 14, 0, 0, 2]


def test_a_quantized_folder_is_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_model(tmp_path / "tiny", monkeypatch)
    assert main(["quantize", str(source), str(tmp_path / "new" / "w4"), "--group-size", "32"]) == 0
    folder = tmp_path / "new" / "w4"
    assert [path.name for path in folder.parent.iterdir()] == ["w4"]
    assert "nats" in (folder / "README.md").read_text() and str(tmp_path) not in (folder / "README.md").read_text()
    original, files = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert not {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} - files.keys()
    assert files["model.layers.1.mlp.down_proj.weight_packed"].shape == (32, 8)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model(input_ids=torch.tensor([[2, 3]]))  # the first forward pass dequantizes the weights
    read = model.state_dict()
    for name in ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj"):
        scales = files[f"{name}.weight_scale"].float().repeat_interleave(32, dim=1)
        assert ((read[f"{name}.weight"] - original[f"{name}.weight"]).abs() <= 0.53 * scales).all()
        assert len((read[f"{name}.weight"] / scales).round().unique()) <= 15


@pytest.mark.parametrize(
    ("case", "fact"),
    [
        ("qwen3_moe", "mixture of experts"),
        ("groups", "--group-size 32"),
        ("exists", "already exists"),
        ("quantized", "(compressed-tensors)"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "tiny", monkeypatch, case if case == "qwen3_moe" else "llama")
    if case == "exists":
        (tmp_path / "w4").mkdir()
    if case == "quantized":
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "compressed-tensors"}
        (source / "config.json").write_text(json.dumps(config))
    size = ["--group-size", "128" if case == "groups" else "32"]
    assert main(["quantize", str(source), str(tmp_path / "w4"), *size]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and fact in error
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", *(["w4"] if case == "exists" else [])}
