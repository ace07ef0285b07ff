"""Sharding of a model, and how ranks find each other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from alphaapollo.models.export import gather_parameters
from alphaapollo.models.sharding import FsdpRoot, full_tensor, join_process_group, make_mesh, shard_model
from alphaapollo.processes.network import reserve_port
from tests.unit.tiny import build_model, run_ranks


class Model(FsdpRoot):
    layers = ()

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def sharded(rank: int, num_ranks: int, address: str) -> dict[str, Any]:
    """Weights of a sharded model, gathered again, and what is left of the model that rank 0 has loaded."""
    join_process_group("cpu", rank, num_ranks, address)
    loaded: list[Model] = []

    def load_weights() -> Model:
        torch.manual_seed(0)
        loaded.append(Model().to(torch.bfloat16))
        return loaded[0]

    with torch.device("meta"):
        model = Model()
    shard_model(model, load_weights, make_mesh("cpu"), torch.float32, offload_policy=False)
    group: Any = dist.group.WORLD
    return {
        "weights": {name: full_tensor(tensor.detach()).numpy() for name, tensor in model.named_parameters()},
        "buffers": {name: (str(buffer.dtype), buffer.float().numpy()) for name, buffer in model.named_buffers()},
        "left": [sum(parameter.numel() for parameter in one.parameters()) for one in loaded],
        "timeout": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


def connect_on_a_held_port(rank: int, num_ranks: int, address: str) -> int:
    port = Path(f"{address.removeprefix('file://')}-port")
    if rank == 0:
        port.with_suffix(".new").write_text(str(reserve_port("127.0.0.1")))
        port.with_suffix(".new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    join_process_group("cpu", rank, num_ranks, f"tcp://127.0.0.1:{port.read_text()}")
    ranks = torch.tensor([rank + 1])
    dist.all_reduce(ranks)
    return int(ranks)


def test_ranks_connect_to_the_port_of_rank_0() -> None:
    assert run_ranks(connect_on_a_held_port, 2) == [3, 3]


def test_all_ranks_get_slices_of_the_weights_that_rank_0_loads() -> None:
    """The loaded weights are bfloat16, the slices float32; each loaded parameter is freed after it was sent."""
    torch.manual_seed(0)
    expected = Model().to(torch.bfloat16)
    (alone,), (first, second) = run_ranks(sharded, 1), run_ranks(sharded, 2)
    for found in (alone, first, second):
        for name, parameter in expected.named_parameters():
            assert found["weights"][name].dtype == np.float32
            np.testing.assert_array_equal(found["weights"][name], parameter.detach().float().numpy())
        for name, buffer in expected.named_buffers():
            assert found["buffers"][name][0] == str(buffer.dtype)
            np.testing.assert_array_equal(found["buffers"][name][1], buffer.float().numpy())
    assert first["left"] == alone["left"] == [0] and second["left"] == []
    assert first["timeout"] == 3600 and first["interface"] == "lo"


def test_weights_are_cast_before_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[torch.dtype] = []

    def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor.dtype)
        return tensor

    monkeypatch.setattr("alphaapollo.models.export.full_tensor", full_tensor)
    model: Any = build_model("qwen3")
    named = dict(gather_parameters(model, torch.bfloat16))
    assert set(gathered) == {torch.bfloat16} and len(gathered) == len(named)
