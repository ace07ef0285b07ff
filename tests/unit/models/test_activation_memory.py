"""Activation bytes measured on the meta device, compared with numbers worked out by hand, for published models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models.activation_memory import (
    estimate_image_bytes,
    load_on_meta_device,
    measure_layer_bytes,
    read_model_sizes,
)
from alphaapollo.models.load import load_config
from tests.unit.tiny import save_model

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"


def meta(name: str) -> torch.nn.Module:
    return load_on_meta_device(Model(path=str(PUBLISHED / name)), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "parameters", "unit", "kv_bytes"),
    [
        ("qwen2.5-0.5b", 494_032_768, 14_912_384, 12_288),
        ("qwen2.5-1.5b", 1_543_714_304, 46_797_824, 28_672),
        ("qwen2.5-7b", 7_615_616_512, 233_057_792, 57_344),
        ("qwen2.5-32b", 32_763_876_352, 487_605_248, 262_144),
        ("qwen3-235b-a22b", 235_093_634_560, 2_487_755_008, 192_512),
    ],
)
def test_published_sizes(name: str, parameters: int, unit: int, kv_bytes: int):
    sizes = read_model_sizes(meta(name))
    assert (sizes.parameters, sizes.layer_parameters, 2 * sizes.kv_elements_per_token) == (parameters, unit, kv_bytes)
    assert sizes.root_parameters == parameters - sizes.num_layers * unit


def test_activations_of_a_layer_by_hand():
    """Qwen2.5-7B in bfloat16, a token and layer: two norms keep their input in float32, the normalised state and their
    output (8 H) and a factor (4); attention its q, k, v, output (2 bytes each) and a float32 a head; the MLP the gate,
    its activation, up and their product (8 I)."""
    hidden, inner, queries, keys, heads = 3584, 18944, 3584, 512, 28
    token = 2 * (8 * hidden + 4) + 4 * queries + 4 * keys + 4 * heads + 8 * inner
    assert measure_layer_bytes(meta("qwen2.5-7b"), 2, 8192) == 2 * 8192 * token


def test_a_float32_mixture_of_experts_can_be_measured(tmp_path: Path):
    model = load_on_meta_device(Model(path=str(save_model("qwen3_moe", tmp_path))), torch.float32)
    assert measure_layer_bytes(model, 2, 16) > 0


def test_capped_scores_are_explicit_fused_or_an_error_as_in_training(tmp_path: Path):
    folder = str(save_model("gemma2", tmp_path))  # which caps scores

    def kept(kind: str) -> int:
        model = load_on_meta_device(Model(path=folder, attention=kind), torch.bfloat16)
        return measure_layer_bytes(model, 1, 512)

    assert kept("sdpa") > 4 * kept("flash")  # scores of 512 x 512 tokens
    with pytest.raises(ValueError, match=r"softcap.* model\.attention=varlen"):
        kept("varlen")


def test_images_take_pixels_and_the_activations_of_a_trained_tower():
    """Qwen2.5-VL: 4 patches per image token, 3 x 2 x 14 x 14 float32 pixels each; 32 blocks of 1280 and 3420."""
    config = load_config(Model(path=str(PUBLISHED / "qwen2.5-vl-7b")))
    pixels = 100 * 4 * 3 * 2 * 14 * 14 * 4
    assert estimate_image_bytes(config, 100, 2, is_trained=False, has_checkpointing=False) == pixels
    block = 9 * 1280 + 3 * 3420
    assert estimate_image_bytes(config, 100, 2, True, has_checkpointing=False) == pixels + 400 * 32 * block * 2
    assert estimate_image_bytes(config, 100, 2, True, has_checkpointing=True) == pixels + 400 * 32 * 1280 * 2
    assert estimate_image_bytes(load_config(Model(path=str(PUBLISHED / "qwen2.5-7b"))), 100, 2, True, False) == 0
