"""Memory of a training rank, compared with FSDP2 on simulated ranks and with hand-calculated numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.launch.memory.model import MemoryUsage, TrainedModelMemory
from alphaapollo.models import sharding
from alphaapollo.models.activation_memory import (
    ActivationBytes,
    ModelSizes,
    load_on_meta_device,
    read_model_sizes,
)
from alphaapollo.models.decoder import find_decoder_layers
from alphaapollo.models.policy import PolicyModel
from tests.unit.tiny import run_ranks

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
NOTHING = ActivationBytes(0, 0, 0)


def slices_of_fsdp(
    _rank: int, _ranks: int, _address: str, name: str, world_size: int, ep_size: int
) -> tuple[int, int, int]:
    """Elements of the first simulated rank, of the largest gathered unit and of the root, as FSDP2 shards them."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    sharding._scatter_weights = lambda *_: None  # the model has no data
    model = load_on_meta_device(Model(path=str(PUBLISHED / name)), torch.float32)
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
        *((name, size, 1) for name in ("qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b") for size in (1, 8, 64)),
        *(("qwen3-235b-a22b", *sizes) for sizes in ((1, 1), (8, 1), (8, 8), (64, 1), (64, 16))),
    ],
)
def test_slices_match_fsdp(name: str, world_size: int, ep_size: int):
    """Weights, gradients and the two moments of published models over simulated ranks; FSDP2 gives the first ranks
    whole rows, so at most a row of each parameter more."""
    ((held, unit, root),) = run_ranks(slices_of_fsdp, 1, name, world_size, ep_size)
    sizes = read_model_sizes(load_on_meta_device(Model(path=str(PUBLISHED / name)), torch.bfloat16))
    trained = TrainedModelMemory(sizes, NOTHING, world_size, 2, ep_size=ep_size)
    assert (trained.gathered_layer_parameters, sizes.root_parameters) == (unit, root)
    assert trained.num_trained_parameters == pytest.approx(held, rel=1e-3)
    assert trained.usage_while_idle() == MemoryUsage(
        weights=4 * trained.num_trained_parameters, optimizer=8 * trained.num_trained_parameters
    )


SIZES = ModelSizes(
    parameters=1000,
    root_parameters=200,
    layer_parameters=100,
    num_layers=8,
    expert_parameters=480,
    layer_expert_parameters=60,
    experts_per_token=2,
    head_parameters=150,
    hidden_size=10,
    kv_elements_per_token=1,
    cached_elements_per_token=1,
    num_heads=1,
    num_kv_heads=1,
)


def test_moments_of_an_update():
    trained = TrainedModelMemory(
        SIZES, ActivationBytes(saved=7000, layer_peak=500, head_peak=900), shards=4, dtype_bytes=2
    )
    own = {"weights": 1000, "gradients": 1000, "optimizer": 2000}
    assert trained.usage_during_update() == {
        "head": MemoryUsage(**own, gathered_layers=400, activations=7000, logits=900),
        "layer": MemoryUsage(**own, gathered_layers=2 * 400 + 400, activations=7500, logits=300),
        "root": MemoryUsage(**own, gathered_layers=8 * 200 + 200),
        "step": MemoryUsage(**own),
    }


def test_a_frozen_vision_tower_has_no_gradients_and_no_moments():
    """200 of 1000 parameters are frozen: 200 per rank are trained, and the rank's 50 frozen ones only have weights."""
    sizes = replace(SIZES, vision_parameters=200, root_parameters=300)
    trained = TrainedModelMemory(sizes, NOTHING, shards=4, dtype_bytes=2, freezes_vision=True)
    own = {"weights": 4 * 200 + 4 * 50, "optimizer": 8 * 200}
    assert trained.usage_while_idle() == MemoryUsage(**own)
    root = trained.usage_during_update()["root"]
    assert root == MemoryUsage(**own, gradients=4 * 200, gathered_layers=2 * 300 + (2 + 4) * 100 + 4 * 100 // 4)


def test_offload_keys_reduce_the_usage():
    def held(**how: bool) -> tuple[int, int, int]:
        trained = TrainedModelMemory(SIZES, NOTHING, 1, 2, **how)
        return trained.usage_while_idle().total, trained.usage_during_update()["head"].total, trained.offloaded_bytes()

    assert held() == (12_000, 16_400, 0)
    assert held(offload_optimizer=True) == (4000, 16_400, 8000)
    assert held(offload_optimizer=True, has_one_step_per_update=True) == (4000, 8400, 8000)
    assert held(offload_optimizer=True, offload_weights=True) == (0, 16_400, 12_000)
    assert held(offload_policy=True) == (0, 400, 12_000)
    assert held(unsharded_gradients=True) == (12_000, 20_400, 0)
