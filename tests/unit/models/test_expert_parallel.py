"""Exchange of tokens between ranks that split the experts of a layer, and models for which this is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from alphaapollo.config.schema import Model
from alphaapollo.models.expert_parallel import check_ep_size, find_experts
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("experts", [[0, 1, 2, 3], [0, 1]], ids=["all ranks", "no token for rank 1"])
def test_outputs_and_gradients_are_those_without_exchange(experts: list[int], implementation: str) -> None:
    expected, found = (run_ranks(run_experts, 2, ep_size, experts, implementation) for ep_size in (1, 2))
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
    with pytest.raises(ValueError, match=r"fsdp_config.ep_size=2: Qwen3ForCausalLM has no experts .*ep_size=1\.$"):
        check_ep_size(Model(path=str(tmp_path / "qwen3")), 2, 2, "fsdp_config.ep_size")
    with pytest.raises(ValueError, match=r"ep_size=8 does not divide the 4 experts of a layer. Set one of 1, 2, 4\.$"):
        check_ep_size(moe, 8, 8, "fsdp_config.ep_size")
    with pytest.raises(
        ValueError, match=r"ep_size=2: 5 ranks share an expert and do not divide its 48 rows. Change .*\.$"
    ):
        check_ep_size(moe, 2, 10, "fsdp_config.ep_size")


def test_experts_of_a_dense_model_are_none() -> None:
    assert find_experts(build_model("qwen3")) == []
