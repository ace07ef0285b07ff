"""Reading a checkpoint does not run code that is in it."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata

from alphaapollo.models.checkpoint import _RestrictedUnpickler as Unpickler
from alphaapollo.models.checkpoint import load_snapshot, read_rng_states, take_snapshot, write_snapshot
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


def replace_generators(saved: Path, trap: Trap) -> None:
    torch.save({"python": trap}, saved / "rank_0.pt")


def replace_metadata(saved: Path, trap: Trap) -> None:
    (saved / "model" / ".metadata").write_bytes(pickle.dumps(trap))


def replace_learning_rate(saved: Path, trap: Trap) -> None:
    """Let the metadata refer to a pickle behind the stored values."""
    stored, metadata_file, pickled = saved / "model" / "__0_0.distcp", saved / "model" / ".metadata", io.BytesIO()
    torch.save(trap, pickled)
    described, data = pickle.loads(metadata_file.read_bytes()), stored.read_bytes()
    info = next(info for index, info in described.storage_data.items() if index.fqn.endswith("param_groups.0.lr"))
    info.length, info.offset = len(pickled.getvalue()), len(data)
    stored.write_bytes(data + pickled.getvalue())
    metadata_file.write_bytes(pickle.dumps(described))


def truncate(saved: Path, _: Trap) -> None:
    (saved / "rank_0.pt").write_bytes((saved / "rank_0.pt").read_bytes()[:100])


@pytest.mark.parametrize("damage", [replace_generators, replace_metadata, replace_learning_rate, truncate])
def test_a_malicious_or_damaged_file_is_an_error_and_runs_no_code(trained, saved: Path, tmp_path: Path, damage) -> None:
    damage(saved, Trap(tmp_path / "sprung"))
    with pytest.raises(ValueError, match=f"{saved} cannot be read"):
        load_snapshot(str(saved), trained[0], [trained[1]])
    assert not (tmp_path / "sprung").exists()
    with pytest.raises(OSError):
        read_rng_states(saved / "rank_7.pt")
