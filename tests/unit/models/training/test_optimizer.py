from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from alphaapollo.config.schema import Actor, Optimizer
from alphaapollo.models.sharding import full_tensor
from alphaapollo.models.train_state import (
    AdamSettings,
    TrainState,
    clip_gradients,
    make_optimizers,
    set_hyperparams,
)
from tests.unit.tiny import free_address


@pytest.fixture
def one_rank():
    if dist.is_initialized():  # by a run of an earlier test in this process
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=free_address(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_clip_by_hand(one_rank: None):
    """Gradients (3, 0) and (4): norm 5, clipped to 1."""
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    unused = nn.Parameter(torch.zeros(1))
    assert clip_gradients([a, b, unused], 1.0) == pytest.approx(5.0)
    assert a.grad.tolist() == pytest.approx([0.6, 0.0])
    assert b.grad.tolist() == pytest.approx([0.8])
    assert clip_gradients([a, b], 2.0) == pytest.approx(1.0)
    assert b.grad.tolist() == pytest.approx([0.8])


def test_settings_of_the_configuration_replace_those_of_a_checkpoint():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    (optimizer,) = make_optimizers(model, Optimizer(weight_decay=0.1))
    set_hyperparams(model, [optimizer], Optimizer(weight_decay=0.3, betas=(0.8, 0.95)))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}


def test_settings_of_adam_for_one_step(one_rank: None):
    """Steps equal those of torch.optim.AdamW with settings that change. A step without settings uses the configured
    ones, eps included."""
    torch.manual_seed(0)
    ours = fully_shard(nn.Linear(3, 2, bias=False), mesh=init_device_mesh("cpu", (1,)))
    plain = nn.Linear(3, 2, bias=False)
    plain.weight.data = full_tensor(ours.weight.detach()).clone()
    state = TrainState(ours, Actor(optim={"lr": 0.01, "weight_decay": 0.1}), 100, "policy", "optim")
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    configured = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    changes = [{}, {"betas": (0.5, 0.6), "eps": 1e-3}, {"weight_decay": 0.0}, {}, {"eps": 1e-12}, {"eps": 1e-12}, {}]
    for number, change in enumerate(changes):
        gradient = torch.randn(2, 3)
        plain.weight.grad = gradient.clone()
        ours.weight.grad = distribute_tensor(gradient, ours.weight.device_mesh, ours.weight.placements)
        optimizer.param_groups[0].update({"lr": 0.01 * number, **configured, **change})
        optimizer.step()
        state.step(lr=0.01 * number, grad_clip=1e9, adam=AdamSettings(**change))  # type: ignore[arg-type]
        torch.testing.assert_close(full_tensor(ours.weight.detach()), plain.weight.detach(), rtol=0, atol=0)


class TopKRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(4))


class CohereLayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))  # of each head


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.down_proj, self.down_proj_bias = nn.Parameter(torch.zeros(4, 8, 8)), nn.Parameter(torch.zeros(4, 8))


def test_muon_takes_only_matrices_and_stacked_biases_do_not_decay():
    model = nn.Module()
    layer = nn.ModuleDict(
        {"q_proj": nn.Linear(8, 8), "q_norm": CohereLayerNorm(), "router": TopKRouter(), "experts": Experts()}
    )
    model.layers, model.embed = nn.ModuleList([layer]), nn.Embedding(10, 8)
    muon, adam = make_optimizers(model, Optimizer(name="muon", weight_decay=0.1))
    names = {parameter: name.removeprefix("layers.0.") for name, parameter in model.named_parameters()}
    found = [[names[parameter] for parameter in group["params"]] for group in adam.param_groups]
    assert [names[one] for one in muon.param_groups[0]["params"]] == ["q_proj.weight", "router.weight"]
    assert found == [
        ["experts.down_proj", "embed.weight"],
        ["q_proj.bias", "q_norm.weight", "router.bias", "experts.down_proj_bias"],
    ]
    assert [group["weight_decay"] for group in (*muon.param_groups, *adam.param_groups)] == [0.1, 0.1, 0.0]
