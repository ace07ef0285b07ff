"""Expert parallelism trains the same as ranks that gather all experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.architectures.models import ARCHITECTURES, VOCABULARY
from tests.unit.tiny import run_ranks, save_tokenizer
from tests.unit.workers.layouts import ACTOR, Layout, check_layouts_train_the_same, train
from tests.unit.workers.training import Case, assert_close, make_worker

FOUR_RANKS = {
    "two": Layout({"ep_size": 2}, checkpointing=True),
    "plain": Layout({}),
    "four, reduced once": Layout({"ep_size": 4, "sync_each_micro_batch": False}),
    "copies, ulysses": Layout({"ep_size": 2, "fsdp_size": 2}, sequence_parallel=2),
}


def make_case(folder: Path) -> Case:
    return Case(str(folder), ACTOR, num_rows=20, mini_batch_size=10, max_tokens=20, needs_reference=True)


def test_expert_parallelism_trains_the_same_on_four_ranks(model_folder, tmp_path: Path):
    """Log-probs, gradients, clipped steps, checkpoints read by another layout, published and exported weights."""
    found = check_layouts_train_the_same(make_case(model_folder("qwen3_moe")), 4, FOUR_RANKS, tmp_path)
    held = {name: [rank.held for rank in ranks] for name, ranks in found.items()}
    assert held["two"] == held["four, reduced once"] == held["plain"]


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_expert_parallelism_with_biases_and_shared_experts(family: str, tmp_path: Path):
    model = next(model for model in ARCHITECTURES if model.family == family)
    save_tokenizer(model.save(tmp_path / "model"), VOCABULARY)
    layouts = {"plain": Layout({}), "two": Layout({"ep_size": 2})}
    check_layouts_train_the_same(make_case(tmp_path / "model"), 2, layouts, tmp_path)


def test_adapters_are_trained_beside_split_experts(model_folder, tmp_path: Path):
    case = replace(make_case(model_folder("qwen3_moe")), lora_rank=4)
    check_layouts_train_the_same(case, 2, {"plain": Layout({}), "two": Layout({"ep_size": 2})}, tmp_path)


def resume(
    rank: int, num_ranks: int, address: str, case: Case, folder: str, has_checkpoint: bool
) -> dict[str, np.ndarray]:
    """Train two updates, with a checkpoint after the first one, or only the second one from the checkpoint."""
    worker = make_worker(case, rank, num_ranks, address)
    if has_checkpoint:
        worker.load(folder)
    else:
        train(worker, case, rank, num_ranks)
        worker.save(folder)
    train(worker, case, rank, num_ranks)
    trained = worker.state.get_trained_tensors()
    found = {f"{kind} {index}": one.numpy() for kind, tensors in trained.items() for index, one in enumerate(tensors)}
    worker.close()
    return found


def test_resuming_with_expert_parallelism_is_exact(model_folder, tmp_path: Path):
    case = Layout({"ep_size": 2}).apply_to(make_case(model_folder("qwen3_moe")))
    without, resumed = (run_ranks(resume, 2, case, str(tmp_path / "checkpoint"), again) for again in (False, True))
    for expected, found in zip(without, resumed, strict=True):
        assert_close(found, expected, atol=0, rtol=0)
