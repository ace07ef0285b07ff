"""Recomputed layers, kept results and offloaded inputs on a GPU: gradients, memory, and no wait of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.batching.batch import Rows
from tests.gpu.test_attention import KINDS, check_near, compute, load
from tests.unit.tiny import build_model, save_tokenizer, some_rows

CHOICES: list[dict[str, Any]] = [
    {"enable_gradient_checkpointing": "selective"},
    {"enable_gradient_checkpointing": 3},
    {"enable_gradient_checkpointing": True, "activation_offload": True},
    {"enable_gradient_checkpointing": "selective", "activation_offload": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model("qwen3", head_dim=64, num_layers=7).save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.mark.parametrize("kind", ["padded", *KINDS])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_gradients_are_those_without_recomputation(folder: Path, kind: str, choice: dict[str, Any]) -> None:
    """Micro-batches of different sizes use the same buffers in host memory."""
    plain, policy = load(folder, kind, enable_gradient_checkpointing=False), load(folder, kind, **choice)
    for count in (6, 12, 3, 12):
        rows = Rows.from_rows(some_rows(count, seed=count))
        check_near(*(compute(model, rows, kind == "padded") for model in (plain, policy)))


def run_layers(folder: Path, states: torch.Tensor, **settings: Any) -> int:
    """Peak bytes of three passes through the decoder, besides weights. The host may wait only in the first one."""
    decoder = load(folder, "sdpa", **settings).model.model
    for number in range(3):
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            decoder(inputs_embeds=states, use_cache=False)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    decoder(inputs_embeds=states, use_cache=False)[0].sum().backward()
    return torch.cuda.max_memory_allocated() - start


def test_memory_falls_and_the_host_never_waits_for_offloaded_inputs(folder: Path) -> None:
    states = torch.randn(1, 16_384, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plain, recomputed = ({"enable_gradient_checkpointing": value} for value in (False, True))
    peaks = [run_layers(folder, states, **choice) for choice in (plain, CHOICES[0], recomputed, CHOICES[2])]
    assert peaks == sorted(peaks, reverse=True) and len({*peaks}) == len(peaks), peaks


@pytest.mark.parametrize("choice", CHOICES[:1], ids=str)
def test_rotations_of_liger_do_not_overwrite_kept_results(
    tmp_path: Path, choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama's products are rotated without a norm between them."""
    pytest.importorskip("liger_kernel")
    from tests.gpu.test_fused import keep_rotations

    keep_rotations("llama", monkeypatch)
    build_model("llama", head_dim=64).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    rows = Rows.from_rows(some_rows(6))
    plain = compute(load(tmp_path, "sdpa", enable_gradient_checkpointing=False), rows, False)
    check_near(plain, compute(load(tmp_path, "sdpa", use_liger=True, **choice), rows, False))
    load(tmp_path, "sdpa", use_liger=True, enable_gradient_checkpointing=False)
    with pytest.raises(ValueError, match="use_liger=false"):
        load(tmp_path, "sdpa", **choice)
