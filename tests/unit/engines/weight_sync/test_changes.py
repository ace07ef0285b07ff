"""Copies of weights on other nodes, which receive the changes since their last version, are equal bit for bit."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaapollo.engines.weight_sync import changes, shared_memory
from alphaapollo.engines.weight_sync.changes import BLOCK, FileChanges, SentFiles, WeightCopy, find_changes
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.engines.weight_sync.shared_memory import SharedAdapterSender, SharedMemorySender, read_safetensors
from alphaapollo.engines.weight_sync.transport import WeightUpdate

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf")]
Tensors = dict[str, torch.Tensor]


def make_tensors(seed: int, dtype: torch.dtype, sizes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}


def change(tensors: Tensors, share: float, seed: int) -> Tensors:
    """Replace a share of the elements by random bits, among them NaNs with payloads, and by special values."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in tensors.items():
        bits = BITS[tensor.dtype]
        limits = torch.iinfo(bits)
        random = torch.randint(limits.min, limits.max, tensor.shape, generator=generator, dtype=bits).view(tensor.dtype)
        special = torch.tensor(SPECIAL, dtype=tensor.dtype)[torch.randint(5, tensor.shape, generator=generator)]
        new = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, random, special)
        chosen = torch.rand(tensor.shape, generator=generator) < share
        changed[name] = torch.where(chosen, new.view(bits), tensor.view(bits)).view(tensor.dtype)
    return changed


def get_bits(tensors: Tensors) -> dict[str, tuple[torch.Size, bytes]]:
    return {
        name: (tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in tensors.items()
    }


class Nodes:
    """The sender of rank 0, and copies of its weights on other nodes."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16, sender: type = SharedMemorySender):
        self.folder = folder
        self.sender: SharedMemorySender = sender(folder / "rank_0", dtype)
        self.reads: list[SentFiles] = []
        self.base_ids: list[str] = []  # that the copies asked for

    def make_copy(self, name: str = "other", keeps_last: bool = False) -> WeightCopy:
        async def read(folder: str, base_id: str) -> SentFiles:
            self.base_ids.append(base_id)
            self.reads.append(self.sender.read_files(folder, base_id))
            return self.reads[-1]

        return WeightCopy(self.folder / name, read, keeps_last)

    def publish(self, tensors: Tensors, version: int, *copies: WeightCopy) -> None:
        """Send the tensors and update the copies, which must then have the same bits."""
        update = self.sender.send(tensors.items(), version)
        assert isinstance(update, WeightUpdate)
        for copy in copies:
            path = asyncio.run(copy.update(update.folder))
            found = {name: tensor.clone() for name, tensor in read_safetensors(path)}
            assert get_bits(found) == get_bits(tensors) and path.parent == copy.folder
            assert format_digest(compute_joint_digest(found.values())) == update.digest
            assert copy.copied_bytes == sum(content.nbytes for content in self.reads[-1].files.values())
        self.sender.release_sent_weights()

    def count_changed_files(self) -> int:
        """Number of files of the last read of which only changes were sent."""
        return sum(isinstance(content, FileChanges) for content in self.reads[-1].files.values())


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


SIZES: dict[str, tuple[int, ...]] = {"a": (50, 40), "b": (2000,), "c": (3, 5, 7), "d": (1,)}


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([*BITS]),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]), min_size=1, max_size=3),
    file_bytes=st.sampled_from([1, 4000, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_copies_have_the_bits_of_every_version(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shares: list[float], file_bytes: int, seed: int
) -> None:
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), dtype)
    copy, tensors = nodes.make_copy(), make_tensors(seed, dtype, SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "FILE_BYTES", file_bytes)
        nodes.publish(tensors, 1, copy)
        for version, share in enumerate(shares, start=2):
            tensors = change(tensors, share, seed + version)
            nodes.publish(tensors, version, copy)
            assert nodes.reads[-1].base_id == nodes.reads[-2].version_id
            if share == 1.0:
                assert nodes.count_changed_files() < len(nodes.reads[-1].files)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, changes._CHUNK + 1, 2 * changes._CHUNK])
@pytest.mark.parametrize("word", ["u2", "u4"])
def test_changes_at_the_ends_of_blocks_are_found_and_applied(tmp_path: Path, size: int, word: str) -> None:
    old = np.random.default_rng(0).integers(0, 1 << 16, size).astype(word)
    new, places = old.copy(), sorted({0, BLOCK - 1, BLOCK, changes._CHUNK, size - 1} & {*range(size)})
    new[places] ^= 1
    old.tofile(tmp_path / "old")
    new.tofile(tmp_path / "new")
    found = find_changes(tmp_path / "new", tmp_path / "old", new.itemsize)
    if size == 1:
        assert found is None  # the changes would be larger than the file
        return
    assert found is not None and found.words.tolist() == new[places].tolist()
    found.apply(tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == (tmp_path / "new").read_bytes()


@pytest.mark.parametrize(("chunks", "is_found"), [(15, False), (17, True)])
def test_changes_up_to_an_eighth_of_the_file_may_stand_at_its_start(
    tmp_path: Path, chunks: int, is_found: bool
) -> None:
    """One chunk of `chunks` has changed. A word and its position need twice the word's 16 bits."""
    new = np.zeros(chunks * changes._CHUNK, "u2")
    new.tofile(tmp_path / "old")
    new[: changes._CHUNK] = 1
    new.tofile(tmp_path / "new")
    assert (find_changes(tmp_path / "new", tmp_path / "old", new.itemsize) is not None) == is_found


def test_files_that_a_version_lacks_are_removed_from_the_copy(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FILE_BYTES", 1)  # a file per tensor
    copy, tensors = nodes.make_copy(), make_tensors(0, torch.bfloat16, SIZES)
    nodes.publish(tensors, 1, copy)
    nodes.publish({name: tensors[name] for name in ("a", "b")}, 2, copy)
    assert nodes.reads[1].base_id and nodes.count_changed_files() == 2


def test_a_copy_without_the_last_version_gets_complete_files(nodes: Nodes) -> None:
    """A new copy, one that missed a version, and one whose folder is gone. Another copy gets the changes."""
    first, second, tensors = nodes.make_copy("first"), nodes.make_copy("second"), make_tensors(0, torch.bfloat16, SIZES)
    nodes.publish(tensors, 1, first, second)
    for version, late in ((2, nodes.make_copy("third")), (3, second), (4, first)):
        if version == 4:
            shutil.rmtree(first.folder)
        tensors = change(tensors, 0.01, version)
        copies = (nodes.make_copy("rest") if late is first else first, late)
        nodes.publish(tensors, version, *copies)
        assert nodes.reads[-1].base_id == "" and nodes.count_changed_files() == 0
        assert [path.name for path in late.folder.iterdir()] == [f"v{version}"]
        if late is not first:
            assert nodes.reads[-2].base_id != ""


def test_a_version_that_is_sent_again_has_another_id(nodes: Nodes) -> None:
    """E.g. after a checkpoint is loaded. The changes are relative to the first version 1."""
    copy, tensors = nodes.make_copy(), make_tensors(0, torch.bfloat16, SIZES)
    nodes.publish(tensors, 1, copy)
    nodes.publish(change(tensors, 0.01, 1), 1, copy)
    assert nodes.reads[0].version_id == nodes.reads[1].base_id != nodes.reads[1].version_id
    with next((copy.folder / "v1").iterdir()).open("rb") as file:  # as an engine that has mapped it
        nodes.publish(change(tensors, 1.0, 2), 2, copy)
        assert os.fstat(file.fileno()).st_nlink == 0 and nodes.count_changed_files() == 0


def test_changes_relative_to_another_version_are_an_error(tmp_path: Path) -> None:
    async def read(folder: str, base_id: str) -> SentFiles:
        return SentFiles("v2-b", "v1-a", {})

    with pytest.raises(ValueError, match="relative to weights 'v1-a', but this copy has ''"):
        asyncio.run(WeightCopy(tmp_path, read).update("v2"))


def test_after_an_error_the_next_version_is_copied_completely(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, tensors = nodes.make_copy(), make_tensors(0, torch.bfloat16, SIZES)
    nodes.publish(tensors, 1, copy)

    def fail(changes: FileChanges, path: Path) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(FileChanges, "apply", fail)
        nodes.publish(change(tensors, 0.01, 1), 1, copy)  # into the same folder
    nodes.publish(change(tensors, 0.01, 2), 3, copy)
    assert nodes.base_ids[1] and nodes.base_ids[2] == nodes.reads[2].base_id == ""
    assert [path.name for path in copy.folder.iterdir()] == ["v3"]


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_the_last_version_is_kept_only_if_it_was_read_and_there_is_space(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    copy, tensors, folder = nodes.make_copy(), make_tensors(0, torch.bfloat16, SIZES), Path(nodes.sender.folder)

    def list_kept() -> list[str]:
        return [path.name for path in folder.iterdir()] if folder.exists() else []

    nodes.publish(tensors, 1)
    assert list_kept() == []
    for version in (2, 3):
        nodes.publish(tensors, version, copy)
        assert list_kept() == (["base"] if free else [])
        assert bool(nodes.reads[-1].base_id) == bool(free and version == 3)
    nodes.publish(tensors, 4)
    assert list_kept() == []


def test_adapters_are_complete_and_the_last_one_is_kept(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, sender=SharedAdapterSender)
    copy = nodes.make_copy(keeps_last=True)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = make_tensors(0, torch.bfloat16, {f"{layer}.lora_A.weight": (4, 600), f"{layer}.lora_B.weight": (600, 4)})
    for version in (1, 2, 3):
        nodes.publish(tensors, version, copy)
        assert nodes.reads[-1].base_id == ""
        assert {path.name for path in copy.folder.iterdir()} == {f"v{version}", f"v{max(version - 1, 1)}"}
