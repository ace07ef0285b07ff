"""Exchange of tokens between ranks that split the experts of a layer, and models for which this is refused."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from alphaapollo.config.schema import Model
from alphaapollo.models.expert_parallel import check_ep_size
from alphaapollo.models.sharding import FsdpRoot, full_tensor, join_process_group, local_tensor, make_mesh, shard_model
from tests.unit.tiny import build_model, run_ranks

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


@pytest.mark.timeout(120)
def test_outputs_and_gradients_are_those_without_exchange() -> None:
    expected, found = (itertools.chain(*run_ranks(run_all, 2, ep_size)) for ep_size in (1, 2))
    for plain, split in zip(expected, found, strict=True):
        assert split.pop("gathered") == plain.pop("gathered") // 2
        assert split.keys() == plain.keys()
        for name, value in plain.items():
            np.testing.assert_allclose(split[name], value, rtol=1e-6, atol=1e-6 * np.abs(value).max(), err_msg=name)


def test_models_without_experts_and_other_numbers_of_experts_are_refused(tmp_path: Path) -> None:
    for name in ("qwen3", "qwen3_moe"):
        build_model(name).config.save_pretrained(tmp_path / name)
    moe = Model(path=str(tmp_path / "qwen3_moe"))
    for size in (1, 2, 4):
        check_ep_size(moe, size, 4, "fsdp_config.ep_size")
    for model, size, world_size, facts in (
        (Model(path=str(tmp_path / "qwen3")), 2, 2, "ep_size=2: Qwen3ForCausalLM .*ep_size=1"),
        (moe, 8, 8, "ep_size=8 .* 4 experts .*1, 2, 4"),
        (moe, 2, 10, "ep_size=2: 5 ranks .* 48 rows"),
    ):
        with pytest.raises(ValueError, match=facts):
            check_ep_size(model, size, world_size, "fsdp_config.ep_size")
