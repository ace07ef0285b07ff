"""Parameters that are read from files are those that transformers loads, and what is written is known before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models.export import gather_parameters, list_parameters
from alphaapollo.models.file_tensors import load_for_ranks
from alphaapollo.models.load import load_causal_lm
from tests.architectures.models import ARCHITECTURES, Architecture

STACKED = {"qwen2_moe", "qwen3_moe", "qwen3_next", "phimoe", "deepseek_v3"}  # files have one tensor per expert


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_marked_parameters_have_the_values_of_the_files(architecture: Architecture, tmp_path: Path) -> None:
    model = Model(path=str(architecture.save(tmp_path)), attention="padded")
    try:
        plain = load_causal_lm(model, "padded")
    except ValueError:
        return  # the architecture is refused
    expected = {name: parameter.data for name, parameter in plain.named_parameters()}
    with load_for_ranks():
        loaded = dict(load_causal_lm(model, "padded").named_parameters())
    assert loaded.keys() == expected.keys()
    marks = {name: one.file_tensor for name, one in loaded.items() if hasattr(one, "file_tensor")}
    for name in expected.keys() - marks.keys():
        assert loaded[name].equal(expected[name])
    for name, tensor in marks.items():
        full, rows = expected[name], slice(1, 1 + len(expected[name]) // 2)
        assert tensor.read().equal(full) and tensor.dtype == full.dtype
        assert tensor.read([rows]).equal(full[rows])
        columns = [slice(0, size // 2 + 1) for size in full.shape[1:]]
        assert tensor.read([rows, *columns]).equal(full[(rows, *columns)])
    experts = [name for name, tensor in marks.items() if tensor.converter]
    assert bool(experts) is (architecture.family in STACKED)
    assert all(loaded[name].untyped_storage().nbytes() <= 8 for name in experts)  # rank 0 has not merged them
    written, listed = dict(gather_parameters(plain, torch.bfloat16)), list_parameters(plain, torch.bfloat16)
    shapes = [[(name, tensor.shape, tensor.dtype) for name, tensor in one.items()] for one in (written, listed)]
    assert shapes[0] == shapes[1]
