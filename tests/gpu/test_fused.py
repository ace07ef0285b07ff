"""Liger's fused kernels against plain layers: log-probs, gradients, and a training worker."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alphaapollo.batching.batch import Rows
from alphaapollo.models.load import LIGER_ARCHITECTURES
from tests.gpu.test_attention import check_near, compute, load
from tests.unit.tiny import build_model, free_address, save_tokenizer, some_rows
from tests.unit.workers.training import Case, make_batch, make_columns, make_worker

pytestmark = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="no liger-kernel")
WORKERS = {"weights": {}, "adapters": {"lora_rank": 4}, "recomputed": {"checkpointing": True}}


def save(name: str, folder: Path) -> str:
    build_model(name, head_dim=64).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


# The plain model runs first: rotations are replaced for all models of the architecture in this process.
@pytest.mark.parametrize("name", LIGER_ARCHITECTURES)
@pytest.mark.parametrize("attention", ["padded", "sdpa"])
def test_fused_kernels_equal_plain_layers(tmp_path: Path, name: str, attention: Any, monkeypatch: pytest.MonkeyPatch):
    keep_rotations(name, monkeypatch)
    folder, rows, results = save(name, tmp_path), Rows.from_rows(some_rows(6)), []
    for fused in (False, True):
        policy = load(folder, attention, use_liger=fused)
        assert ("Liger" in repr(policy.model)) is fused
        results.append(compute(policy, rows, attention == "padded"))
    check_near(*results)


def keep_rotations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the functions that the kernels replace in the architecture's module."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    classes = [attribute for attribute in vars(module) if attribute.endswith(("RMSNorm", "MLP"))]
    for attribute in ("apply_rotary_pos_emb", *classes):
        monkeypatch.setattr(module, attribute, getattr(module, attribute))


@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_trains_with_them(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """With FSDP2 per layer: the first log-probs are those of plain layers, and a step changes them."""
    keep_rotations("qwen3", monkeypatch)
    case = Case(save("qwen3", tmp_path), {"optim": {"lr": 1e-3}}, "auto", device="cuda", mini_batch_size=5)
    case, found = replace(case, max_tokens=60, **WORKERS[kind]), []
    batch = make_batch(case, 1)
    for fused in (False, True):
        worker = make_worker(replace(case, use_liger=fused), 0, 1, free_address())
        worker.load_batch(batch.rank_batches[0])
        before = worker.compute_log_probs()
        figures = worker.update(make_columns(case, batch, 0, old=False))
        found.append((before, figures["actor/grad_norm"]))
        assert np.abs(worker.compute_log_probs() - before).max() > 1e-3
        worker.close()
    assert np.abs(found[1][0] - found[0][0]).mean() < 0.03
    assert found[1][1] == pytest.approx(found[0][1], rel=0.05)
