"""Every optimizer gives the same weights on one and several ranks as without sharding, and after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from alphaapollo.config.schema import SftConfig
from alphaapollo.models.checkpoint import CheckpointWriter
from alphaapollo.models.sharding import FsdpRoot, full_tensor, join_process_group, local_tensor, make_mesh, shard_model
from alphaapollo.models.train_state import TrainState
from alphaapollo.workers.process_group import shut_down_rank
from tests.unit.tiny import run_ranks

SETTINGS = {"lr": 0.01, "weight_decay": 0.1}
NAMES = ["adamw", "muon", "adamw_8bit"]


class Network(FsdpRoot):
    """Two layers with matrices of 16,384 parameters, which torchao quantizes also on two ranks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 64), nn.Linear(64, 256, bias=False), nn.Linear(256, 6)])
        self.head = nn.Linear(6, 2)


def make_network() -> Network:
    torch.manual_seed(0)
    return Network()


def set_gradients(network: nn.Module, step: int) -> None:
    """Set random gradients, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def make_state(name: str, rank: int, num_ranks: int, address: str, fsdp_size: int = -1) -> TrainState:
    join_process_group("cpu", rank, num_ranks, address)
    with torch.device("meta"):
        network = Network()
    shard_model(network, make_network, make_mesh("cpu", fsdp_size), torch.float32, offload_policy=False)
    config = SftConfig(optim={"name": name, **SETTINGS}, grad_clip=1e9)
    return TrainState(network, config, 10, "network", "optim")


def run_steps(state: TrainState, steps: range) -> list[np.ndarray]:
    """Run optimizer steps and return the complete weights."""
    for step in steps:
        set_gradients(state.module, step)
        state.step()
    return [full_tensor(parameter.detach()).numpy().copy() for parameter in state.module.parameters()]


def train(rank: int, num_ranks: int, address: str, name: str) -> list[np.ndarray]:
    return run_steps(make_state(name, rank, num_ranks, address), range(3))


def train_plain(name: str) -> list[np.ndarray]:
    """Three steps of torch's or torchao's own optimizers, without sharding."""
    from torchao.optim import AdamW8bit

    network = make_network()
    matrices = [parameter for parameter in network.layers.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in network.parameters() if not any(parameter is one for one in matrices)]
    optimizers: list[torch.optim.Optimizer] = []
    if name == "muon":
        optimizers.append(torch.optim.Muon(matrices, **SETTINGS, adjust_lr_fn="match_rms_adamw"))
    else:
        others += matrices
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    quantized = name == "adamw_8bit"
    optimizers.append(AdamW8bit(groups, lr=0.01) if quantized else torch.optim.AdamW(groups, lr=0.01, fused=True))
    for step in range(3):
        set_gradients(network, step)
        for optimizer in optimizers:
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        network.zero_grad()
    return [parameter.detach().numpy() for parameter in network.parameters()]


@pytest.fixture(autouse=True)
def clean_process_group():
    yield
    if torch.distributed.is_initialized():
        shut_down_rank()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[np.ndarray]]:
    """Weights after three steps of the plain optimizers."""
    return {name: train_plain(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_those_of_the_plain_optimizer(name: str, expected: dict[str, list[np.ndarray]]) -> None:
    start = [parameter.detach().numpy() for parameter in make_network().parameters()]
    assert all(np.abs(end - begin).max() > 1e-3 for end, begin in zip(expected[name], start, strict=True))
    assert all(map(np.array_equal, train(0, 1, "", name), expected[name]))


def train_all_and_save(rank: int, num_ranks: int, address: str, folder: str) -> dict[str, list[np.ndarray]]:
    """Train with each optimizer. A checkpoint after two of three steps is written while training continues."""
    weights = {}
    for name in NAMES:
        state = make_state(name, rank, num_ranks, address)
        run_steps(state, range(2))
        writer = CheckpointWriter(in_background=True)
        writer.start([state.snapshot(f"{folder}/{name}")])
        weights[name] = run_steps(state, range(2, 3))
        writer.save_future.result()
        writer.close()
    return weights


def test_two_ranks_train_and_save_the_same(tmp_path: Path, expected: dict[str, list[np.ndarray]]) -> None:
    """A checkpoint of two ranks is loaded by one rank."""
    by_rank = run_ranks(train_all_and_save, 2, str(tmp_path))
    for name in NAMES:
        resumed = make_state(name, 0, 1, "")
        resumed.load(str(tmp_path / name))
        assert resumed.num_steps == 2
        for weights in (by_rank[0][name], by_rank[1][name], run_steps(resumed, range(2, 3))):
            assert all(map(np.array_equal, weights, expected[name])), name


def train_copies_and_save(rank: int, num_ranks: int, address: str, folder: str) -> list[np.ndarray]:
    state = make_state("muon", rank, num_ranks, address, fsdp_size=2)
    weights = run_steps(state, range(3))
    writer = CheckpointWriter(in_background=False)
    writer.start([state.snapshot(folder)])
    writer.close()
    return weights


def test_two_copies_of_the_model_train_the_same(tmp_path: Path, expected: dict[str, list[np.ndarray]]) -> None:
    """HSDP: in each copy, the three matrices are orthogonalized by two ranks, and both copies write the checkpoint."""
    for weights in run_ranks(train_copies_and_save, 4, str(tmp_path)):
        assert all(map(np.array_equal, weights, expected["muon"]))
    sizes = [sum(file.stat().st_size for file in tmp_path.glob(f"model/__{rank}_*.distcp")) for rank in range(4)]
    assert 0 < max(sizes) < 1.5 * min(sizes)
    loaded = make_state("muon", 0, 1, "")
    loaded.load(str(tmp_path))
    assert all(map(np.array_equal, run_steps(loaded, range(0)), expected["muon"]))


def test_muon_is_for_matrices_of_layers() -> None:
    state = make_state("muon", 0, 1, "")
    muon, adam = state.optimizers
    shapes = [[tuple(p.shape) for group in one.param_groups for p in group["params"]] for one in (muon, adam)]
    assert shapes == [[(64, 256), (256, 64), (6, 256)], [(2, 6), (64,), (6,), (2,)]]
    assert local_tensor(next(state.module.parameters())).dtype == torch.float32
