from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from alphaapollo.models.export import safetensors_files
from alphaapollo.models.export.safetensors_files import SafetensorsWriter
from tests.unit.tiny import build_model


def test_one_file_has_no_index(tmp_path: Path) -> None:
    files = SafetensorsWriter(tmp_path / "new")
    files.add("a", torch.ones(3))
    files.close()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_each_file_is_written_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 bytes per file: a has 40, b 40, c 100, d 8."""
    monkeypatch.setattr(safetensors_files, "FILE_BYTES", 64)
    files = SafetensorsWriter(tmp_path)
    tensors = {name: torch.randn(size) for name, size in {"a": 10, "b": 10, "c": 25, "d": 2}.items()}
    written = []
    for name, tensor in tensors.items():
        files.add(name, tensor)
        written.append(len(list(tmp_path.iterdir())))
    assert written == [0, 1, 2, 3]  # never more than one file's tensors are held
    files.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 188}
    assert index["weight_map"] == {name: f"model-{i:05d}-of-00004.safetensors" for i, name in enumerate("abcd", 1)}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_transformers_loads_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(safetensors_files, "FILE_BYTES", 10_000)
    model: Any = build_model("llama")
    model.config.save_pretrained(tmp_path)
    files = SafetensorsWriter(tmp_path)
    for name, parameter in model.named_parameters():
        files.add(name, parameter.detach())
    files.close()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(own, other) for own, other in zip(model.parameters(), loaded.parameters(), strict=True))
