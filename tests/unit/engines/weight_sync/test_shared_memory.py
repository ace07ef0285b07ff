"""Buckets of weights, and the files in which they and adapters are sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from alphaapollo.engines.weight_sync import buckets, shared_memory
from alphaapollo.engines.weight_sync.buckets import make_buckets
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.engines.weight_sync.shared_memory import (
    SharedAdapterSender,
    SharedMemorySender,
)
from alphaapollo.engines.weight_sync.transport import WeightUpdate


def test_buckets_are_cast_and_complete() -> None:
    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3).t()}
    (part,) = make_buckets(tensors.items(), torch.bfloat16)
    assert list(part) == ["a", "b"] and all(
        one.dtype == torch.bfloat16 and one.is_contiguous() for one in part.values()
    )


def test_a_bucket_ends_with_the_tensor_that_reaches_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 8)  # two numbers
    parts = list(make_buckets(((str(index), torch.zeros(1)) for index in range(5)), torch.float32))
    assert [len(part) for part in parts] == [2, 2, 1]


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


LAYER = "base_model.model.model.layers.0.self_attn"


def adapter() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = {f"{LAYER}.{name}.lora_{part}.weight" for name in ("q_proj", "v_proj") for part in "AB"}
    return {name: torch.randn((4, 6) if ".lora_A." in name else (6, 4)) for name in sorted(names)}


def test_sent_folder_is_a_peft_adapter_with_scale_one(tmp_path: Path) -> None:
    sender = SharedAdapterSender(tmp_path / "w", torch.bfloat16)
    update = sender.send(adapter().items(), version=2)
    assert update is not None and update.version == 2
    read = load_file(tmp_path / "w" / update.folder / "adapter_model.safetensors")
    assert read.keys() == adapter().keys()
    assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in adapter().items())
    assert update.digest == format_digest(compute_joint_digest(read.values()))
    config = json.loads((tmp_path / "w" / update.folder / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == 4 and config["target_modules"] == ["q_proj", "v_proj"]


def test_an_adapter_is_kept_until_the_next_is_complete(tmp_path: Path) -> None:
    sender = SharedAdapterSender(tmp_path / "w", torch.float32)

    def list_kept() -> list[str]:
        return sorted(path.name for path in (tmp_path / "w").iterdir() if (path / "adapter_config.json").is_file())

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        assert list_kept() == ["v1"]
        yield from adapter().items()

    def fail() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(adapter().items())[:2]
        raise ValueError("not finite")

    sender.send(adapter().items(), version=1)
    sender.release_sent_weights()
    assert list_kept() == ["v1"]
    sender.send(gather(), version=2)
    assert list_kept() == ["v2"]
    with pytest.raises(ValueError, match="not finite"):
        sender.send(fail(), version=3)
    assert list_kept() == ["v2"]
    sender.send(adapter().items(), version=4)
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v4"]
