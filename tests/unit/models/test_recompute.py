"""What recomputed layers compute twice, and what they keep, against the memory plan."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Model
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.recompute import ATTENTION
from alphaapollo.planning.model_memory import estimate_activations

TOKENS, LAYERS = 512, 6  # attention over more than 256 tokens is fused
WIDTHS = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 64, "head_dim": 32}
SIZES = WIDTHS | {"num_attention_heads": 4, "num_key_value_heads": 2}


class LiveStorages(TorchDispatchMode):
    """Mode that counts operations, and the bytes of the storages that operations have made and that are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.peak, self.operations = dict[int, int](), 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.operations[func.name()] += 1
        given, returned = (
            {leaf.untyped_storage()._cdata: leaf.untyped_storage() for leaf in tree_leaves(tree) if is_tensor(leaf)}
            for tree in ((args, kwargs), made)
        )
        for key in returned.keys() - given.keys() - self.bytes.keys():
            self.bytes[key] = returned[key].nbytes()
            weakref.finalize(returned[key], self.bytes.pop, key)
        self.peak = max(self.peak, sum(self.bytes.values()))
        return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same model with half of the layers, and with all."""
    folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
    for folder, layers in zip(folders, (LAYERS // 2, LAYERS), strict=True):
        AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, num_hidden_layers=layers)).save_pretrained(folder)
    return folders


@dataclass
class Measured:
    kept: int  # bytes after a forward pass
    planned: int
    peak: int  # bytes in a forward and backward pass
    operations: Counter[str]


def measure(folder: Path, **settings: Any) -> Measured:
    model = resolve_model(Model(path=str(folder), attention="padded", **settings), "cpu")
    decoder = load_causal_lm(model, "padded").model
    with LiveStorages() as live:
        states = decoder(inputs_embeds=torch.randn(1, TOKENS, 128, requires_grad=True), use_cache=False)[0]
        kept = sum(live.bytes.values())
        states.sum().backward()
    return Measured(kept, estimate_activations(model, 1, TOKENS, "cpu").saved, live.peak, live.operations)


def test_memory_falls_as_planned_and_selective_repeats_no_product(folders: list[Path]) -> None:
    """Planned bytes of recomputed layers are exact; what other layers save is estimated. A repeated forward pass ends
    before a layer's last product."""
    choices: tuple[Any, ...] = (False, 3, "selective", True)
    found = {one: [measure(folder, enable_gradient_checkpointing=one) for folder in folders] for one in choices}
    for choice, (half, full) in found.items():  # without what is outside of the layers
        tolerance = 0 if choice in ("selective", True) else 0.01
        assert full.kept - half.kept == pytest.approx(full.planned - half.planned, rel=tolerance)
    for larger, smaller in pairwise(full for _, full in found.values()):
        assert smaller.peak < 0.87 * larger.peak
    counts = [[full.operations[name] for name in ("aten::mm", ATTENTION[1])] for _, full in found.values()]
    once = [7 * 3 * LAYERS, LAYERS]  # seven products, each with two in the backward pass
    assert counts == [once, [once[0] + 6 * 2, once[1] + 2], once, [once[0] + 6 * LAYERS, 2 * LAYERS]]


def test_an_offloaded_input_is_a_copy_until_the_backward_pass(folders: list[Path]) -> None:
    """On a CPU, host memory is the memory of the device, so that nothing is saved. The test keeps the first input."""
    recomputed, offloaded = (
        measure(folders[1], enable_gradient_checkpointing=True, activation_offload=value) for value in (False, True)
    )
    assert offloaded.planned == recomputed.planned
    assert offloaded.kept == recomputed.kept + 4 * TOKENS * 128
    assert offloaded.operations["aten::clone"] == recomputed.operations["aten::clone"] + LAYERS - 1


def test_rotations_that_overwrite_products_are_refused(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["transformers.models.qwen3.modeling_qwen3"]
    monkeypatch.setattr(module.apply_rotary_pos_emb, "__module__", "liger_kernel.transformers.rope")
    load_causal_lm(Model(path=str(folders[0]), enable_gradient_checkpointing=True), "padded")
    with pytest.raises(ValueError, match=r"selective: another model .* Set use_liger=false"):
        load_causal_lm(Model(path=str(folders[0]), enable_gradient_checkpointing="selective"), "padded")
