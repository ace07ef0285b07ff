"""Exchange of tokens between ranks that split the experts of a layer, and models for which this is refused."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from alphaapollo.models.sharding import FsdpRoot, full_tensor, join_process_group, local_tensor, make_mesh, shard_model
from tests.unit.tiny import build_model

NUM_TOKENS, CHOICES = 5, 2


class Layer(FsdpRoot):
    layers = ()

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        self.experts = experts

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output: Tensor = self.experts(hidden, chosen, weights) * self.scale.weight
        return output


def build_layer(implementation: str) -> Layer:
    model: Any = build_model("qwen3_moe")
    model.set_experts_implementation(implementation)
    layer = Layer(model.model.layers[0].mlp.experts)
    nn.init.ones_(layer.scale.weight)
    return layer


def run_experts(
    rank: int, num_ranks: int, address: str, ep_size: int, experts: list[int], implementation: str
) -> dict[str, Any]:
    """Each rank sends its tokens to two of `experts`. Returns its output and gradients."""
    join_process_group("cpu", rank, num_ranks, address)
    build = partial(build_layer, implementation)
    layer = shard_model(build().to("meta"), build, make_mesh("cpu", -1, ep_size), torch.float32, False)
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(NUM_TOKENS, 32, generator=generator, requires_grad=True)
    weights = torch.rand(NUM_TOKENS, CHOICES, generator=generator, requires_grad=True)
    chosen = torch.tensor(experts)[torch.rand(NUM_TOKENS, len(experts), generator=generator).argsort(1)[:, :CHOICES]]
    output = layer(hidden, chosen, weights)
    output.square().sum().backward()
    gathered = {name: full_tensor(p.grad).numpy() for name, p in layer.named_parameters() if p.grad is not None}
    for module in layer.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return {
        "output": output.detach().numpy(),
        "hidden": hidden.grad.numpy(),
        "weights": weights.grad.numpy(),
        **gathered,
        "gathered": sum(local_tensor(parameter).numel() for parameter in layer.experts.parameters()),
    }


def run_all(rank: int, num_ranks: int, address: str, ep_size: int) -> list[dict[str, Any]]:
    cases = itertools.product([[0, 1, 2, 3], [0, 1]], ["grouped_mm", "eager"])  # with [0, 1], rank 1 gets no token
    return [run_experts(rank, num_ranks, address, ep_size, *case) for case in cases]
