"""Reward model training compared with plain transformers, and between layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from alphaapollo.batching.packing import build_batch_layout, distribute_preference_examples
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import FrozenFsdp, Model, RmConfig
from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.models import sharding
from alphaapollo.models.load import load_reward_model
from alphaapollo.types import Row
from alphaapollo.workers.critic import RewardModelWorker
from alphaapollo.workers.preference import RewardTrainingWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.unit.tiny import run_ranks
from tests.unit.workers.test_preference_worker import Case, assert_alike, some_pairs
from tests.unit.workers.training import record_gradients, scale_weights

CENTRING = 0.1


def pairs() -> list[PreferenceExample]:
    """The last token of each answer is its response; the third pair has a margin."""
    found = some_pairs()
    for pair in found:
        pair.rows = [scored(row) for row in pair.rows]
    found[2].margin = 0.7
    return found


def scored(row: Row) -> Row:
    return Row(row.token_ids, [0] * (len(row.token_ids) - 1) + [1], row.logprobs, row.turn_ends)


def make_worker(case: Case, rank: int, num_ranks: int, address: str) -> RewardTrainingWorker:
    sharding.MIN_UNIT = 0
    config = RmConfig(
        model={"path": case.folder, "attention": case.attention, "lora_rank": case.lora_rank},
        bradley_terry={"centring_coef": CENTRING},
        optim={"lr": 0.01},
    )
    placement = RankPlacement(rank, num_ranks, address, "cpu", 1)
    return RewardTrainingWorker(config, resolve_model(config.model, "cpu"), placement, 3)


def gradients(rank: int, num_ranks: int, address: str, case: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    worker = make_worker(case, rank, num_ranks, address)
    scale_weights(worker.model, 3.0)  # scores away from zero
    recorded = record_gradients(worker)
    batch = distribute_preference_examples(pairs(), num_ranks, case.max_tokens, worker.builder.padded, case.share)[rank]
    sums = worker.step(batch).metric_sums
    assert worker.evaluate(batch) == pytest.approx(sums, rel=1e-6)
    worker.close()
    return recorded[0], sums


def by_transformers(folder: str) -> tuple[dict[str, np.ndarray], float]:
    model = load_reward_model(Model(path=folder, enable_gradient_checkpointing=False), "padded", None, head_seed=0)
    model.set_attn_implementation("eager")
    scale_weights(model, 3.0)
    losses = []
    for pair in pairs():
        chosen, rejected = (model(torch.tensor([row.token_ids])).logits[0, -1].double() for row in pair.rows)
        losses.append(-logsigmoid(chosen - rejected - pair.margin) + CENTRING * (chosen + rejected) ** 2)
    mean = torch.stack(losses).mean()
    mean.backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}, mean.item()


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_gradients_are_those_of_transformers(model_folder, name: str):
    folder = str(model_folder(name))
    expected, loss = by_transformers(folder)
    for case in (Case(folder), Case(folder, attention="sdpa", max_tokens=40), Case(folder, max_tokens=40, share=True)):
        found, sums = gradients(0, 1, "", case)
        assert sums["loss"] / sums["compared"] == pytest.approx(loss, rel=1e-4)
        assert_alike(found, expected, 3e-4)


def test_two_ranks_change_nothing(model_folder):
    case = Case(str(model_folder("qwen3")))
    expected, sums = gradients(0, 1, "", case)
    for found, own_sums in run_ranks(gradients, 2, Case(case.folder, attention="sdpa", max_tokens=40, share=True)):
        assert own_sums == pytest.approx(sums, rel=1e-4)
        assert_alike(found, expected, 3e-4)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_exported_model_gives_the_scores_of_training(model_folder, close_later, tmp_path: Path, lora_rank: int):
    """As a frozen reward model, as transformers loads it, and as the start of another training."""
    case = Case(str(model_folder("qwen3")), lora_rank=lora_rank)
    worker = close_later(make_worker(case, 0, 1, ""))
    batch = distribute_preference_examples(pairs(), 1, 10_000, True, False)[0]
    before = worker.evaluate(batch)
    for _ in range(3):
        worker.step(batch)
    after = worker.evaluate(batch)
    assert after["loss"] < before["loss"]
    folder = tmp_path / "model"
    worker.export(str(folder))

    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [row for pair in pairs() for row in pair.rows]
    with torch.no_grad():
        expected = [plain(torch.tensor([row.token_ids])).logits.item() for row in rows]
    chosen, rejected = sum(expected[0::2]), sum(expected[1::2])
    assert after["score_chosen"] == pytest.approx(chosen, abs=1e-4)
    assert after["score_rejected"] == pytest.approx(rejected, abs=1e-4)
    model = resolve_model(Model(path=str(folder)), "cpu")
    frozen = close_later(RewardModelWorker(model, FrozenFsdp(), RankPlacement(0, 1, "", "cpu", 1)))
    layout = build_batch_layout(rows, range(len(rows)), 1, len(rows), 10_000, True, 0, False)
    scores = layout.join_columns([frozen.compute_scores(layout.rank_batches[0])])
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    again = close_later(make_worker(Case(str(folder)), 0, 1, ""))
    assert again.evaluate(batch)["loss"] == pytest.approx(after["loss"], abs=1e-4)
