"""Memory of a training rank, compared with FSDP2 on simulated ranks and with hand-calculated numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.launch.memory.model import MemoryUsage, TrainedModel
from alphaapollo.models import sharding
from alphaapollo.models.activation_memory import Activations, ModelSizes, load_meta, read_model_sizes
from alphaapollo.models.decoder import find_decoder_layers
from alphaapollo.models.policy import PolicyModel
from tests.unit.tiny import run_ranks

PUBLISHED = Path(__file__).resolve().parents[3] / "scripts" / "published_models"
NOTHING = Activations(0, 0, 0)


def slices_of_fsdp(_rank: int, _ranks: int, _address: str, name: str, world_size: int) -> tuple[int, int, int]:
    """Elements of the first simulated rank, of the largest unit and of the root, as FSDP2 shards them."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    sharding._scatter = lambda *_: None  # the model has no data
    model = load_meta(Model(path=str(PUBLISHED / name)), torch.float32)
    policy = PolicyModel(model)
    layers = find_decoder_layers(model)
    sharding.shard(policy, sharding.make_mesh("cpu"), torch.bfloat16, False)
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    held = sum(parameter.to_local().numel() for parameter in policy.parameters())
    unit = sum(parameter.numel() for parameter in layers[0].parameters())
    return held, unit, sum(parameter.numel() for parameter in policy.parameters()) - unit * len(layers)


@pytest.mark.parametrize("world_size", [1, 8, 64])
@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-235b-a22b"])
def test_slices_match_fsdp(name: str, world_size: int):
    """Weights, gradients and the two moments of published models over simulated ranks; FSDP2 gives the first ranks
    whole rows, so at most a row of each parameter more."""
    ((held, unit, root),) = run_ranks(slices_of_fsdp, 1, name, world_size)
    sizes = read_model_sizes(load_meta(Model(path=str(PUBLISHED / name)), torch.bfloat16))
    trained = TrainedModel(sizes, NOTHING, world_size, 2)
    assert (sizes.unit, sizes.root) == (unit, root)
    assert trained.slices == pytest.approx(held, rel=1e-3)
    assert trained.idle() == MemoryUsage(weights=4 * trained.slices, optimizer=8 * trained.slices)


SIZES = ModelSizes(
    parameters=1000, root=200, unit=100, num_layers=8, head=150, tied=True, hidden_size=10, kv_elements=1, kv_heads=1
)


def test_moments_of_an_update():
    trained = TrainedModel(SIZES, Activations(saved=7000, layer=500, head=900), shards=4, dtype_bytes=2)
    own = {"weights": 1000, "gradients": 1000, "optimizer": 2000}
    assert trained.plan_update() == {
        "head": MemoryUsage(**own, gathered_layers=400, activations=7000, logits=900),
        "layer": MemoryUsage(**own, gathered_layers=2 * 400 + 400, activations=7500, logits=300),
        "root": MemoryUsage(**own, gathered_layers=8 * 200 + 200),
        "step": MemoryUsage(**own),
    }


def test_offload_keys_reduce_the_usage():
    def held(**how: bool) -> tuple[int, int, int]:
        trained = TrainedModel(SIZES, NOTHING, 1, 2, **how)
        return trained.idle().total, trained.plan_update()["head"].total, trained.host_bytes()

    assert held() == (12_000, 16_400, 0)
    assert held(offload_optimizer=True) == (4000, 16_400, 8000)
    assert held(offload_optimizer=True, has_one_step=True) == (4000, 8400, 8000)
    assert held(offload_optimizer=True, offload_weights=True) == (0, 16_400, 12_000)
    assert held(offload_policy=True) == (0, 400, 12_000)
    assert held(unsharded_gradients=True) == (12_000, 20_400, 0)
