"""Expert parallelism trains the same as ranks that gather all experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures.models import ARCHITECTURES
from tests.unit.tiny import save_tokenizer
from tests.unit.workers.layouts import ACTOR, Layout, check_layouts_train_the_same
from tests.unit.workers.training import Case

FOUR_RANKS = {
    "plain": Layout({}),
    "two": Layout({"ep_size": 2}),
    "four": Layout({"ep_size": 4}, checkpointing=True),
    "copies": Layout({"ep_size": 2, "fsdp_size": 2}),
    "reduced once": Layout({"ep_size": 2, "sync_each_micro_batch": False}),
    "ulysses": Layout({"ep_size": 2}, sequence_parallel=2),
    "plain again": Layout({}),
}


def make_case(folder: Path) -> Case:
    return Case(str(folder), ACTOR, num_rows=20, mini_batch_size=10, max_tokens=20, needs_reference=True)


@pytest.mark.timeout(400)
def test_expert_parallelism_trains_the_same_on_four_ranks(model_folder, tmp_path: Path):
    """Log-probs, gradients, clipped steps, checkpoints read by another layout, published and exported weights."""
    found = check_layouts_train_the_same(make_case(model_folder("qwen3_moe")), 4, FOUR_RANKS, tmp_path)
    held = {name: [rank.held for rank in ranks] for name, ranks in found.items()}
    assert held["two"] == held["four"] == held["plain"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_expert_parallelism_with_biases_and_shared_experts(family: str, tmp_path: Path):
    model = next(model for model in ARCHITECTURES if model.family == family)
    save_tokenizer(model.save(tmp_path / "model"))
    layouts = {"plain": Layout({}), "two": Layout({"ep_size": 2})}
    check_layouts_train_the_same(make_case(tmp_path / "model"), 2, layouts, tmp_path)
