"""Reading a checkpoint does not run code that is in it."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata

from alphaapollo.models.checkpoint.reader import _RestrictedUnpickler as Unpickler
from alphaapollo.models.checkpoint.reader import read_rng_states
from alphaapollo.models.checkpoint.snapshot import load_snapshot, take_snapshot, write_snapshot
from alphaapollo.models.sharding import FsdpRoot, shard_model
from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement, initialize_rank, shut_down_rank


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self.file), os.O_CREAT)


class Model(FsdpRoot):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.layers = [self.layer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.fixture
def trained():
    """Sharded model and its optimizer after a step, on one rank."""
    torch.manual_seed(0)
    mesh, *_ = initialize_rank(RankPlacement(0, 1, NO_RENDEZVOUS, "cpu", 1))
    with torch.device("meta"):
        model = Model()
    shard_model(model, Model, mesh, torch.float32, offload_policy=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    yield model, optimizer
    shut_down_rank()


@pytest.fixture
def saved(trained, tmp_path: Path) -> Path:
    model, optimizer = trained
    write_snapshot(take_snapshot(str(tmp_path / "saved"), model, [optimizer], {"step": 3}), dist.group.WORLD)
    return tmp_path / "saved"


def state(trained) -> list[bytes]:
    model, optimizer = trained
    tensors = [parameter.detach().full_tensor() for parameter in model.parameters()]
    tensors += [
        value.full_tensor() for one in optimizer.state.values() for name, value in one.items() if name != "step"
    ]
    return [tensor.numpy().tobytes() for tensor in tensors]


def test_checkpoint_restores_the_saved_state(trained, saved: Path) -> None:
    before, drawn = state(trained), np.random.get_state()[1].copy()
    model, optimizer = trained
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    np.random.rand(7)
    assert state(trained) != before
    assert load_snapshot(str(saved), model, [optimizer]) == {"world_size": 1, "step": 3}
    assert state(trained) == before and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert (np.random.get_state()[1] == drawn).all()


@pytest.mark.parametrize("file", ["model/.metadata", "rank_0.pt"])
def test_a_malicious_pickle_is_an_error_and_does_not_run(trained, saved: Path, tmp_path: Path, file: str) -> None:
    if file.endswith(".pt"):
        torch.save({"python": Trap(tmp_path / "sprung")}, saved / file)
    else:
        (saved / file).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match="cannot be read"):
        load_snapshot(str(saved), trained[0], [trained[1]])
    assert not (tmp_path / "sprung").exists()


class Attribute:
    """Pickled as a call of getattr."""

    def __init__(self, *arguments: object):
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return getattr, self.arguments


def test_enum_members_as_written_by_python_before_3_11_4() -> None:
    def unpickled(*arguments: object) -> object:
        return Unpickler(io.BytesIO(pickle.dumps(Attribute(*arguments)))).load()

    kind = metadata._MEM_FORMAT_ENCODING
    assert unpickled(kind, "TORCH_CHANNELS_LAST") is kind.TORCH_CHANNELS_LAST
    with pytest.raises(pickle.UnpicklingError, match=r"calls getattr on .*Size"):
        unpickled(torch.Size, "__new__")


def test_a_malicious_optimizer_value(trained, saved: Path, tmp_path: Path) -> None:
    """Replace the pickle of a value, e.g. lr, by bytes of the same length."""
    stored = saved / "model" / "__0_0.distcp"
    data = stored.read_bytes()
    described = pickle.loads((saved / "model" / ".metadata").read_bytes())
    info = next(info for index, info in described.storage_data.items() if index.fqn.endswith("param_groups.0.lr"))
    trap = io.BytesIO()
    torch.save(Trap(tmp_path / "sprung"), trap)
    info.length = len(trap.getvalue())
    info.offset = len(data)
    stored.write_bytes(data + trap.getvalue())
    (saved / "model" / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(ValueError, match="cannot be read"):
        load_snapshot(str(saved), trained[0], [trained[1]])
    assert not (tmp_path / "sprung").exists()


def test_a_truncated_file_is_an_error(trained, saved: Path) -> None:
    (saved / "rank_0.pt").write_bytes((saved / "rank_0.pt").read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{saved} cannot be read"):
        load_snapshot(str(saved), trained[0], [trained[1]])
    with pytest.raises(OSError):
        read_rng_states(saved / "rank_7.pt")
