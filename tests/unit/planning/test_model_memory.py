"""Memory of a training rank, compared with FSDP2 on simulated ranks and with hand-calculated numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from alphaapollo.config.schema import Fsdp, Model
from alphaapollo.config.schema.model import RoleFsdp
from alphaapollo.models import sharding
from alphaapollo.models.decoder import find_decoder_layers
from alphaapollo.models.load import load_without_weights
from alphaapollo.models.policy import PolicyModel
from alphaapollo.planning.model_memory import (
    Activations,
    ModelSizes,
    RankModel,
    Usage,
    count_adapter_parameters,
    estimate_activations,
    estimate_idle,
    estimate_image_bytes,
    estimate_layer_bytes,
    estimate_update,
    load_model_sizes,
    make_rank_model,
)
from tests.quantized import save_quantized
from tests.unit.tiny import run_ranks

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"


def slices_of_fsdp(
    _rank: int, _ranks: int, _address: str, name: str, world_size: int, ep_size: int
) -> tuple[int, int, int]:
    """Elements of the first simulated rank, of the largest gathered unit and of the root, as FSDP2 shards them."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    sharding._fill_slices = lambda *_: None  # the model has no data
    model = load_without_weights(Model(path=str(PUBLISHED / name)))
    policy = PolicyModel(model)
    layers = find_decoder_layers(model)
    sharding.shard_model(policy, Model, sharding.make_mesh("cpu", -1, ep_size), torch.bfloat16, False)
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    held = sum(parameter.to_local().numel() for parameter in policy.parameters())
    units = [module for module in layers[0].modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    unit = sum(parameter._orig_size.numel() for group in groups for parameter in group.fsdp_params)
    of_layers = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return held, unit, sum(parameter.numel() for parameter in policy.parameters()) - of_layers


@pytest.mark.parametrize(
    ("name", "world_size", "ep_size"),
    [
        ("qwen2.5-0.5b", 64, 1),
        ("qwen2.5-7b", 8, 1),
        *(("qwen3-235b-a22b", *sizes) for sizes in ((1, 1), (8, 8), (64, 16))),
    ],
)
def test_slices_match_fsdp(name: str, world_size: int, ep_size: int):
    """Weights, gradients and the two moments of published models over simulated ranks; FSDP2 gives the first ranks
    whole rows, so at most a row of each parameter more."""
    ((held, unit, root),) = run_ranks(slices_of_fsdp, 1, name, world_size, ep_size)
    trained = make_rank_model(bfloat16(name), Fsdp(ep_size=ep_size), "cuda", world_size, (1, 8))
    assert (trained.sizes.count_gathered_layer(ep_size), trained.sizes.root_parameters) == (unit, root)
    assert trained.state == estimate_idle(trained)
    assert trained.state == Usage(
        weights=pytest.approx(4 * held, rel=1e-3), optimizer=pytest.approx(8 * held, rel=1e-3)
    )


def bfloat16(name: str) -> Model:
    return Model(path=str(PUBLISHED / name), dtype="bfloat16", attention="varlen", enable_gradient_checkpointing=False)


SIZES = ModelSizes(
    parameters=1000,
    root_parameters=200,
    layer_parameters=100,
    num_layers=8,
    saved_per_token=1,
    norms_per_token=1,
    expert_parameters=480,
    layer_expert_parameters=60,
    head_parameters=150,
    hidden_size=10,
    kv_elements_per_token=1,
    num_heads=1,
    num_kv_heads=1,
)


def make(fsdp: Fsdp | None = None, shards: int = 4, **settings: object) -> RankModel:
    """All 1000 parameters in float32 with two moments, unless `settings` differ."""
    own = 1000 // shards
    given = {"state": Usage(weights=4 * own, optimizer=8 * own), "trained": 1000, **settings}
    return RankModel(SIZES, fsdp or Fsdp(), shards, 2, **given)


def test_peak_of_an_update():
    def peak(saved: int, layer: int, head: int) -> Usage:
        return estimate_update(make(saved_bytes=saved, layer_bytes=layer, head_bytes=head))

    own = Usage(weights=1000, gradients=1000, optimizer=2000)
    assert peak(7000, 500, 9000) == own + Usage({"gathered layers": 400, "activations": 7000, "logits": 9000})
    in_layer = Usage({"gathered layers": 2 * 400 + 400, "activations": 7500, "logits": 300})
    assert peak(7000, 500, 900) == own + in_layer
    assert peak(0, 0, 0) == own + Usage({"gathered layers": 8 * 200 + 200})  # the root's gradients are reduced


def test_a_frozen_vision_tower_has_no_gradients_and_no_moments():
    model = bfloat16("qwen2.5-vl-7b")
    trained = make_rank_model(model, Fsdp(), "cuda", 4, (1, 8))
    complete, tower = load_model_sizes(model).parameters, load_model_sizes(model).vision_parameters
    own = (complete - tower) // 4
    assert trained.state["weights"] == pytest.approx(complete) and tower > 6e8
    assert (trained.state["optimizer"], estimate_update(trained)["gradients"]) == (8 * own, 4 * own)


def test_offload_keys_reduce_the_usage():
    def held(steps: int = 2, **how: bool) -> tuple[int, int]:
        trained = make(RoleFsdp.model_validate(how), 1, steps_per_update=steps)
        return estimate_idle(trained).total(), estimate_update(trained).total()

    assert held() == (12_000, 18_400)
    assert held(optimizer_offload=True) == (4000, 18_400)
    assert held(1, optimizer_offload=True) == (4000, 16_000)
    assert held(optimizer_offload=True, param_offload=True) == (0, 18_400)
    assert held(offload_policy=True) == (0, 2400)
    assert held(sync_each_micro_batch=False) == (12_000, 21_100)


PUBLISHED_SIZES = [
    ("qwen2.5-0.5b", 494_032_768, 14_912_384, 12_288),
    ("qwen2.5-7b", 7_615_616_512, 233_057_792, 57_344),
    ("qwen3-235b-a22b", 235_093_634_560, 2_487_755_008, 192_512),
]


@pytest.mark.parametrize(("name", "parameters", "unit", "kv_bytes"), PUBLISHED_SIZES)
def test_published_sizes(name: str, parameters: int, unit: int, kv_bytes: int):
    sizes = load_model_sizes(bfloat16(name))
    assert (sizes.parameters, sizes.layer_parameters, 2 * sizes.kv_elements_per_token) == (parameters, unit, kv_bytes)
    assert sizes.root_parameters == parameters - sizes.num_layers * unit


def test_weights_of_4_bits_take_half_a_byte_and_their_scales(model_folder, tmp_path: Path):
    folder, plain = save_quantized(model_folder("llama"), tmp_path)
    model = Model(path=str(folder), lora_rank=4, dtype="bfloat16", attention="sdpa")
    sizes, full = load_model_sizes(model), load_model_sizes(Model(path=str(plain)))
    quantized = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)  # in two layers
    assert (sizes.parameters, sizes.flops) == (full.parameters, full.flops)
    base = 2 * (sizes.parameters - quantized) + quantized // 2 + 2 * quantized // 16
    assert sizes.count_bytes(2) == base
    adapters = count_adapter_parameters(model)
    rank = make_rank_model(model, Fsdp(), "cuda", 1, (1, 16))
    assert rank.state["weights"] == base + 4 * adapters
    shutil.copytree(folder, bare := tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert load_model_sizes(Model(path=str(bare))) == sizes


def test_activations_of_a_layer():
    """Qwen2.5-7B in bfloat16, a token and layer: two norms keep their input in float32, the normalized state and their
    output (8 H) and a factor (4); attention its q, k, v, output (2 bytes each) and a float32 a head; the MLP the gate,
    its activation, up and their product (8 I)."""
    hidden, inner, queries, keys, heads = 3584, 18944, 3584, 512, 28
    token = 2 * (8 * hidden + 4) + 4 * queries + 4 * keys + 4 * heads + 8 * inner
    assert estimate_layer_bytes(bfloat16("qwen2.5-7b"), 2, 8192) == pytest.approx(2 * 8192 * token, rel=0.02)


def test_experts_save_what_their_tokens_need():
    """Qwen3-30B-A3B, measured on the meta device with torch's hooks for saved tensors: 97,600 numbers per token."""
    assert estimate_layer_bytes(bfloat16("qwen3-30b-a3b"), 1, 1) == pytest.approx(2 * 97_600, rel=0.05)


def test_images_take_the_activations_of_a_trained_tower():
    """Qwen2.5-VL: 4 patches per image token; 32 blocks of 1280 and 3420."""
    model = bfloat16("qwen2.5-vl-7b")
    assert estimate_image_bytes(model, 100) == 0
    trained = model.model_copy(update={"freeze_vision": False})
    assert estimate_image_bytes(trained, 100) == 400 * 32 * (9 * 1280 + 3 * 3420) * 2
    recomputed = trained.model_copy(update={"enable_gradient_checkpointing": True})
    assert estimate_image_bytes(recomputed, 100) == 400 * 32 * 1280 * 2
    assert estimate_image_bytes(bfloat16("qwen2.5-7b"), 100) == 0


def test_activations_of_recomputed_layers():
    """Qwen2.5-7B with 28 layers, 8192 tokens in bfloat16: an input of 3584; selective also keeps q, k, v, output, gate,
    up and down, and of attention the output and a float32 per head."""
    model, tokens = bfloat16("qwen2.5-7b"), 8192

    def estimate(choice: object, offload: bool = False) -> Activations:
        settings = {"enable_gradient_checkpointing": choice, "activation_offload": offload}
        return estimate_activations(model.model_copy(update=settings), 1, tokens, "cuda")

    layer, one_input = estimate_layer_bytes(model, 1, tokens), 2 * 3584 * tokens
    assert estimate(False) == Activations(28 * layer)
    assert estimate(True) == Activations(28 * one_input, layer)
    assert estimate(5) == Activations(5 * one_input + 23 * layer, layer)
    kept = (2 * (3584 + 512 + 512 + 3584 + 2 * 18944 + 3584 + 3584) + 4 * 28) * tokens
    assert estimate("selective") == Activations(28 * (one_input + kept), layer - kept)
    assert estimate(True, offload=True) == Activations(3 * one_input, layer, 27 * 2**26)  # 56 MiB in buffers of 64


def test_kept_products_of_experts():
    """Qwen3-30B-A3B: q, k, v, output, and gate and up of 8 experts. down has 768 inputs for 2048 numbers."""
    sizes = load_model_sizes(bfloat16("qwen3-30b-a3b"))
    assert sizes.products_per_token == 4096 + 2 * 512 + 2048 + 8 * 2 * 768
    assert sizes.attention_per_token == 32 * 128
