from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alphaapollo.types import WeightUpdate
from alphaapollo.weight_sync import buckets
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sent_tensors_have_the_engines_dtype_and_match_the_digest(tmp_path, dtype: torch.dtype):
    update = SharedMemorySender(tmp_path / "w", dtype).send(tensors().items(), version=7)
    sent = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    assert update is not None and update.version == 7 and update.folder == "v7"
    assert update.digest == format_digest(compute_joint_digest(sent.values()))
    found = read(tmp_path / "w", update)
    assert found.keys() == sent.keys() and all(torch.equal(found[name], sent[name]) for name in sent)


def test_large_models_are_sent_in_buckets(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 100)
    update = SharedMemorySender(tmp_path / "w", torch.float32).send(tensors().items(), version=0)
    assert len(list((tmp_path / "w" / "v0").iterdir())) == 2  # 96 + 32 bytes, then 60
    assert read(tmp_path / "w", update).keys() == tensors().keys()
    assert update.digest == format_digest(compute_joint_digest(tensors().values()))


def test_only_one_version_exists_and_none_after_release(tmp_path):
    sender = SharedMemorySender(tmp_path / "w", torch.float32)
    sender.send(tensors().items(), version=1)
    sender.send(tensors().items(), version=2)
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v2"]
    sender.release_sent_weights()
    assert not (tmp_path / "w").exists()
    sender.release_sent_weights()


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
