"""Memory of a training rank, compared with FSDP2 on simulated ranks and with hand-calculated numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alphaapollo.config.schema import Fsdp, Model
from alphaapollo.config.schema.model import RoleFsdp
from alphaapollo.models import sharding
from alphaapollo.models.activation_memory import (
    ModelSizes,
    load_on_meta_device,
    read_model_sizes,
)
from alphaapollo.models.decoder import find_decoder_layers
from alphaapollo.models.policy import PolicyModel
from alphaapollo.planning.memory import TrainedModel, Usage, estimate_idle, estimate_update
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
    trained = TrainedModel(sizes, Fsdp(ep_size=ep_size), world_size, 2)
    assert (trained.gathered_layer_parameters, sizes.root_parameters) == (unit, root)
    assert trained.trained_parameters == pytest.approx(held, rel=1e-3)
    assert estimate_idle(trained) == Usage(
        weights=4 * trained.trained_parameters, optimizer=8 * trained.trained_parameters
    )


SIZES = ModelSizes(
    parameters=1000,
    root_parameters=200,
    layer_parameters=100,
    num_layers=8,
    expert_parameters=480,
    layer_expert_parameters=60,
    head_parameters=150,
    hidden_size=10,
    kv_elements_per_token=1,
    num_heads=1,
    num_kv_heads=1,
)


def test_peak_of_an_update():
    def peak(saved: int, layer: int, head: int) -> Usage:
        return estimate_update(TrainedModel(SIZES, Fsdp(), 4, 2, saved, layer, head))

    own = Usage(weights=1000, gradients=1000, optimizer=2000)
    assert peak(7000, 500, 9000) == own + Usage({"gathered layers": 400, "activations": 7000, "logits": 9000})
    in_layer = Usage({"gathered layers": 2 * 400 + 400, "activations": 7500, "logits": 300})
    assert peak(7000, 500, 900) == own + in_layer
    assert peak(0, 0, 0) == own + Usage({"gathered layers": 8 * 200 + 200})  # the root's gradients are reduced


def test_a_frozen_vision_tower_has_no_gradients_and_no_moments():
    """200 of 1000 parameters are frozen: 200 per rank are trained, and the rank's 50 frozen ones only have weights."""
    sizes = replace(SIZES, vision_parameters=200, root_parameters=300)
    trained = TrainedModel(sizes, Fsdp(), shards=4, dtype_bytes=2, freezes_vision=True)
    own = Usage(weights=4 * 200 + 4 * 50, optimizer=8 * 200)
    assert estimate_idle(trained) == own
    peak = estimate_update(trained)
    assert (peak["weights"], peak["gradients"], peak["optimizer"]) == (1000, 4 * 200, 8 * 200)


def test_offload_keys_reduce_the_usage():
    def held(steps: int = 2, **how: bool) -> tuple[int, int, int]:
        trained = TrainedModel(SIZES, RoleFsdp.model_validate(how), 1, 2, steps_per_update=steps)
        return estimate_idle(trained).total(), estimate_update(trained).total(), trained.offloaded_bytes

    assert held() == (12_000, 18_400, 0)
    assert held(optimizer_offload=True) == (4000, 18_400, 8000)
    assert held(1, optimizer_offload=True) == (4000, 16_000, 8000)
    assert held(optimizer_offload=True, param_offload=True) == (0, 18_400, 12_000)
    assert held(offload_policy=True) == (0, 2400, 12_000)
    assert held(sync_each_micro_batch=False) == (12_000, 21_100, 0)
