"""HSDP, and gradients reduced once per optimizer step, train the same as one copy of the model."""

from __future__ import annotations

from pathlib import Path

from tests.unit.workers.layouts import ACTOR, Layout, check_layouts_train_the_same
from tests.unit.workers.training import Case

LAYOUTS = {
    "plain": Layout({}),
    "copies of two": Layout({"fsdp_size": 2}),
    "copies of one": Layout({"fsdp_size": 1}),
    "reduced once": Layout({"sync_each_micro_batch": False}),
    "copies, reduced once": Layout({"fsdp_size": 2, "sync_each_micro_batch": False}),
}


def test_hsdp_and_deferred_reduction_train_the_same_on_four_ranks(model_folder, tmp_path: Path):
    """Gradients, clipped steps, checkpoints read by another grouping, published and exported weights."""
    folder = str(model_folder("qwen3"))
    case = Case(folder, ACTOR, num_rows=20, mini_batch_size=10, max_tokens=20, needs_reference=True)
    found = check_layouts_train_the_same(case, 4, LAYOUTS, tmp_path)
    total = sum(value.size for value in found["plain"][0].weights.values())
    held = {name: [rank.held for rank in ranks] for name, ranks in found.items()}
    assert held["copies of one"] == [total] * 4
    assert max(held["plain"]) < min(held["copies of two"]) < total
