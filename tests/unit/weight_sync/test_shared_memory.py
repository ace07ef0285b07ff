from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync import buckets
from alphaapollo.weight_sync.digest import format_digest, tensors_digest
from alphaapollo.weight_sync.shared_memory import SharedMemorySender


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(4, 6), "b.weight": torch.randn(8).t(), "c.weight": torch.randn(3, 5).t()}


def read(folder: Path, update: WeightUpdate) -> dict[str, torch.Tensor]:
    read: dict[str, torch.Tensor] = {}
    for path in sorted((folder / update.folder).glob("*.safetensors")):
        read |= load_file(path)
    return read


def test_what_is_sent_can_be_read_and_its_digest_is_told(tmp_path):
    sent = tensors()
    update = SharedMemorySender(tmp_path / "w", torch.float32).send(sent.items(), version=7)
    assert update is not None and update.version == 7 and update.folder == "v7"
    assert update.digest == format_digest(tensors_digest(sent.values()))
    assert read(tmp_path / "w", update).keys() == sent.keys()
    assert all(torch.equal(read(tmp_path / "w", update)[name], sent[name]) for name in sent)


def test_tensors_are_cast_to_the_engines_dtype_before_the_digest(tmp_path):
    update = SharedMemorySender(tmp_path / "w", torch.bfloat16).send(tensors().items(), version=0)
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in tensors().items()}
    assert update.digest == format_digest(tensors_digest(cast.values()))
    assert all(torch.equal(read(tmp_path / "w", update)[name], cast[name]) for name in cast)


def test_large_models_go_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "BATCH_BYTES", 100)
    update = SharedMemorySender(tmp_path / "w", torch.float32).send(tensors().items(), version=0)
    assert len(list((tmp_path / "w" / "v0").iterdir())) == 2  # 96 + 32 bytes, then 60
    assert read(tmp_path / "w", update).keys() == tensors().keys()
    assert update.digest == format_digest(tensors_digest(tensors().values()))


def test_one_version_at_a_time_and_nothing_after_release(tmp_path):
    sender = SharedMemorySender(tmp_path / "w", torch.float32)
    sender.send(tensors().items(), version=1)
    sender.send(tensors().items(), version=2)
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v2"]
    sender.release()
    assert not (tmp_path / "w").exists()
    sender.release()


def test_a_rank_that_does_not_write_still_gathers(tmp_path):
    gathered = []

    def gather():
        for name, tensor in tensors().items():
            gathered.append(name)
            yield name, tensor

    sender = SharedMemorySender(tmp_path / "w", torch.float32, is_writer=False)
    assert sender.send(gather(), version=1) is None
    sender.release()
    assert gathered == list(tensors()) and not (tmp_path / "w").exists()


def test_a_full_shared_memory_says_what_to_do(tmp_path, monkeypatch):
    def full(batch, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ValueError, match=r"No space left.*needs 0\.00 GiB.*more shared memory"):
        SharedMemorySender(tmp_path / "w", torch.float32).send(tensors().items(), version=1)
