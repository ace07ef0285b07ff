"""Files that are written tensor by tensor equal those of huggingface_hub, byte for byte."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import torch

from alphaapollo.models.weight_writer import write_weights

SPLIT = huggingface_hub.split_torch_state_dict_into_shards


def read_folder(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("max_bytes", [10**9, 1000])
def test_files_are_those_of_huggingface_hub(tmp_path: Path, max_bytes: int) -> None:
    torch.manual_seed(0)
    tensors = {f"layer.{number}.weight": torch.randn(7, 3 * number).bfloat16() for number in range(12)}
    tensors |= {"é": torch.randn(3), "large": torch.randn(40, 40), "scalar": torch.tensor(2), "mask": torch.ones(5) > 0}
    (tmp_path / "hub").mkdir()
    huggingface_hub.save_torch_state_dict(tensors, tmp_path / "hub", max_shard_size=max_bytes)
    shapes = {name: tensor.to("meta") for name, tensor in tensors.items()}
    with mock.patch.object(huggingface_hub, SPLIT.__name__, partial(SPLIT, max_shard_size=max_bytes)):
        write_weights(tmp_path / "own", shapes, reversed(tensors.items()))
    expected = read_folder(tmp_path / "hub")
    assert read_folder(tmp_path / "own") == expected and (len(expected) > 5) is (max_bytes == 1000)
