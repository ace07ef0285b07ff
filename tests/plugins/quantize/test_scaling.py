"""Activation-aware scaling changes no outputs, and rounding then costs less where inputs have outliers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from alphaapollo.cli.main import main
from alphaapollo.plugins.quantize import write
from alphaapollo.plugins.quantize.rounding import round_to_groups
from alphaapollo.plugins.quantize.scaling import divide_outputs, find_offset, find_scales, scale_layers
from alphaapollo.plugins.quantize.write import LogprobChange, QuantizedModel
from tests.builders import write_rows
from tests.plugins.quantize.test_quantize import save_model
from tests.unit import tiny

TEXTS = torch.randint(2, tiny.VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(1))
OUTLIERS = [3, 17]  # channels


def add_outliers(model: nn.Module) -> None:
    """Make some outputs of the norms large, and the weights that read them small."""
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data[OUTLIERS] = norm.weight.data[OUTLIERS] * 30 + 29 * find_offset(norm, norm.weight)
        for part in layer.modules():
            if isinstance(part, nn.Linear) and part not in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.data[:, OUTLIERS] /= 10


@torch.no_grad()
def compute_logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TEXTS).logits.double()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "granite"])
def test_scaling_changes_no_outputs(name: str) -> None:
    model = tiny.build_model(name)
    add_outliers(model)
    before, expected = {key: value.clone() for key, value in model.state_dict().items()}, compute_logits(model)
    scale_layers(model, TEXTS, 16, torch.float32)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    for key in ("input_layernorm", "self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
        assert f"model.layers.1.{key}.weight" in changed, key
    assert not {"model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"} & changed
    torch.testing.assert_close(compute_logits(model), expected, rtol=1e-3, atol=1e-4)


def round_model(model: nn.Module) -> nn.Module:
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            codes, scales = round_to_groups(layer.weight.data, 16)
            layer.weight.data = (codes.unflatten(1, (-1, 16)) * scales.float()[..., None]).flatten(1)
    return model


def test_outliers_cost_less() -> None:
    errors = []
    for is_scaled in (False, True):
        model = tiny.build_model("llama")
        add_outliers(model)
        expected = compute_logits(model)
        if is_scaled:
            scale_layers(model, TEXTS[:4], 16, torch.bfloat16)
        errors.append(float((compute_logits(round_model(model)) - expected)[4:].square().mean()))
    assert errors[1] < 0.2 * errors[0]


def test_scales_are_powers_of_the_mean_input() -> None:
    """The grid contains the exact answer: with these inputs, only alpha = 0.5 makes all weights multiples of a step."""
    x = torch.tensor([[1.0, 4.0, 16.0, 64.0]]).repeat(8, 1)
    codes = torch.tensor([[7.0, 3.0, -5.0, 2.0], [-7.0, 6.0, 1.0, -4.0]])
    scales = find_scales(codes / x[0] ** 0.5, x, torch.arange(4), 4)
    torch.testing.assert_close(scales, torch.tensor([1.0, 2.0, 4.0, 8.0]) / 8**0.5)


def test_a_norm_is_divided_by_scales_that_its_written_weight_has() -> None:
    norm, scales = nn.LayerNorm(4), torch.tensor([3.0, 0.7, 1.0, 5.0])
    norm.weight.data, norm.bias.data = torch.tensor([1.0, -2.0, 0.0, 4.0]), torch.ones(4)
    x = torch.randn(5, 4)
    expected = norm(x) - norm.bias
    exact = divide_outputs(norm, scales, torch.bfloat16)
    torch.testing.assert_close((norm(x) - norm.bias) * exact, expected)
    torch.testing.assert_close(exact, torch.tensor([3.0, 0.7, 1.0, 5.0]), rtol=2**-8, atol=0)
    assert torch.equal(norm.weight, norm.weight.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_card_says_what_scaling_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    source = save_model(tmp_path / "tiny", monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    add_outliers(model)
    model.to(dtype).save_pretrained(source)
    text, *prompts = [" ".join(f"w{token}" for token in tokens) for tokens in TEXTS.flatten().view(8, -1).tolist()]
    monkeypatch.setattr(write, "TEXT", text)
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts] * 2)
    words = ["quantize", str(source), str(tmp_path / "w4"), "--group-size", "32"]
    assert main([*words, "--prompts", str(tmp_path / "prompts.jsonl")]) == 0
    card = (tmp_path / "w4" / "README.md").read_text()
    scaled, nearest = re.findall(r"each token by ([\d.]+) nats", card)
    gain = float(re.search(r"Scaling gains ([\d.]+) nats", card)[1])
    assert gain == pytest.approx(float(nearest) - float(scaled), abs=2e-4) and gain > 0


def test_the_card_says_that_scaling_does_not_help() -> None:
    nearest, scaled = LogprobChange(-0.1, 0.2), LogprobChange(-0.1, 0.25)
    assert "Scaling does not help" in str(QuantizedModel(1, 2, 1, -3.0, nearest, scaled))
    assert "caling" not in str(QuantizedModel(1, 2, 1, -3.0, nearest, None))


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("missing.parquet", None, "missing.parquet"),
        ("missing.txt", None, "cannot be read"),
        ("short.txt", b"A wave", "fewer than 256"),
        ("binary.txt", b"\xff\xfe\x00", "UTF-8"),
        ("rows.jsonl", b'{"text": "A wave"}\n', "prompt"),
    ],
)
def test_bad_prompts_are_one_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes | None,
    fact: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, file = save_model(tmp_path / "tiny", monkeypatch), tmp_path / name
    if content is not None:
        file.write_bytes(content)
    words = ["quantize", str(source), str(tmp_path / "w4"), "--group-size", "32", "--prompts", str(file)]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and fact in error
    assert not (tmp_path / "w4").exists()
