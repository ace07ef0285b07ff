"""Sharding of a model, and how ranks find each other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from alphaapollo.models import sharding
from alphaapollo.models.export.hf_folder import gather_parameters
from alphaapollo.models.sharding import FsdpRoot, join_process_group, make_mesh, shard_model
from alphaapollo.utils.network import reserve_port
from tests.unit.tiny import build_model, run_ranks


class Model(FsdpRoot):
    layers = ()

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def tensors_for_other_ranks(rank: int, num_ranks: int, address: str) -> dict[str, Any]:
    join_process_group("cpu", rank, num_ranks, address)
    kept: dict[str, torch.Tensor] = {}

    def scatter(model: nn.Module, tensors: dict[str, torch.Tensor], *others: Any) -> None:
        kept.update(tensors)

    sharding._scatter_params = scatter  # type: ignore[assignment]
    model = Model()
    parameters = {id(one) for one in (*model.parameters(), *model.buffers())}
    shard_model(model, make_mesh("cpu"), torch.float32, offload_policy=False)
    group: Any = dist.group.WORLD
    return {
        "names": sorted(kept),
        "parameters": [name for name, tensor in kept.items() if id(tensor) in parameters],
        "timeout": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
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


@pytest.mark.timeout(120)
def test_ranks_connect_to_the_port_of_rank_0() -> None:
    assert run_ranks(connect_on_a_held_port, 2) == [3, 3]


@pytest.mark.timeout(120)
def test_rank_0_keeps_no_reference_to_parameters() -> None:
    """FSDP moves parameters to the GPU in place, so a reference to one would keep it there. Tensors for other ranks are
    kept on the host, and only if there are other ranks."""
    first, second = run_ranks(tensors_for_other_ranks, 2)
    assert first["parameters"] == second["parameters"] == second["names"] == []
    assert len(first["names"]) == 7
    assert first["timeout"] == 3600 and first["interface"] == "lo"
    (alone,) = run_ranks(tensors_for_other_ranks, 1)
    assert alone["names"] == []


def test_weights_are_cast_before_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[torch.dtype] = []

    def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor.dtype)
        return tensor

    monkeypatch.setattr("alphaapollo.models.export.hf_folder.full_tensor", full_tensor)
    model: Any = build_model("qwen3")
    named = dict(gather_parameters(model, torch.bfloat16))
    assert set(gathered) == {torch.bfloat16} and len(gathered) == len(named)
