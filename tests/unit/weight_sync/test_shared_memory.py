from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync import shared_memory
from alphaapollo.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.weight_sync.shared_memory import SharedMemorySender


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(4, 6), "b.weight": torch.randn(8).t(), "c.weight": torch.randn(3, 5).t()}


def read(folder: Path, update: WeightUpdate) -> dict[str, torch.Tensor]:
    read: dict[str, torch.Tensor] = {}
    for path in sorted((folder / update.folder).glob("*.safetensors")):
        read |= load_file(path)
    return read


@pytest.mark.parametrize(("dtype", "num_buckets"), [(torch.bfloat16, 1), (torch.float32, 2)])
def test_sent_tensors_have_the_engines_dtype_and_match_the_digest(
    tmp_path, monkeypatch, dtype: torch.dtype, num_buckets: int
):
    """In float32 the buckets have 96 + 32, and 60 bytes. Only one version exists, and none after its release."""
    monkeypatch.setattr(shared_memory, "FILE_BYTES", 100)
    sender = SharedMemorySender(tmp_path / "w", dtype)
    sender.send(tensors().items(), version=6)
    update = sender.send(tensors().items(), version=7)
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v7"]
    sent = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    assert update is not None and update.version == 7 and update.folder == "v7"
    assert update.digest == format_digest(compute_joint_digest(sent.values()))
    assert len(list((tmp_path / "w" / "v7").iterdir())) == num_buckets
    found = read(tmp_path / "w", update)
    assert found.keys() == sent.keys() and all(torch.equal(found[name], sent[name]) for name in sent)
    for _ in range(2):
        sender.release_sent_weights()
        assert not (tmp_path / "w").exists()


def test_non_writing_rank_still_gathers(tmp_path):
    gathered = []

    def gather():
        for name, tensor in tensors().items():
            gathered.append(name)
            yield name, tensor

    sender = SharedMemorySender(tmp_path / "w", torch.float32, is_writer=False)
    assert sender.send(gather(), version=1) is None
    sender.release_sent_weights()
    assert gathered == list(tensors()) and not (tmp_path / "w").exists()


def test_full_shared_memory_error_has_a_fix(tmp_path, monkeypatch):
    def full(batch, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ValueError, match=r"No space left.*0\.00 GiB"):
        SharedMemorySender(tmp_path / "w", torch.float32).send(tensors().items(), version=1)
