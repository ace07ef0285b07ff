"""Reward model training compared with plain transformers. test_layouts.py has all layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.config.schema import Model
from alphaapollo.models.load import load_reward_model
from tests.unit.workers.layouts import assert_gradients_close, compute
from tests.unit.workers.preferences import distribute, make_examples
from tests.unit.workers.training import Case, make_worker, scale_weights

REWARD = Case("qwen3", role="reward", settings={"bradley_terry": {"centring_coef": 0.1}, "optim": {"lr": 0.01}})


def by_transformers(case: Case) -> tuple[dict[str, np.ndarray], float]:
    model = load_reward_model(Model(path=case.folder, enable_gradient_checkpointing=False), "padded", None, head_seed=0)
    model.set_attn_implementation("eager")
    scale_weights(model, 3.0)
    losses = []
    for pair in make_examples(case):
        chosen, rejected = (model(torch.tensor([row.token_ids])).logits[0, -1].double() for row in pair.rows)
        losses.append(-logsigmoid(chosen - rejected - pair.margin) + 0.1 * (chosen + rejected) ** 2)
    mean = torch.stack(losses).mean()
    mean.backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}, mean.item()


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_gradients_are_those_of_transformers(locate, name: str):
    case = locate(replace(REWARD, folder=name, max_tokens=40))
    (found,), (gradients, loss) = compute(0, 1, "", [case]), by_transformers(case)
    assert found.metrics["loss"] / found.metrics["examples"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(found.gradients, gradients)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_exported_model_gives_the_scores_of_training(locate, close_later, tmp_path: Path, lora_rank: int):
    """As a frozen reward model, as transformers loads it, and as the start of another training."""
    case = locate(replace(REWARD, lora_rank=lora_rank))
    worker, pairs = close_later(make_worker(case)), make_examples(case)
    (batch,) = distribute(case, pairs)
    before = worker.evaluate(batch)
    for _ in range(3):
        worker.step(batch)
    after = worker.evaluate(batch)
    assert after["loss"] < before["loss"]
    folder = tmp_path / "model"
    worker.export(str(folder))

    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [row for pair in pairs for row in pair.rows]
    with torch.no_grad():
        expected = [plain(torch.tensor([row.token_ids])).logits.item() for row in rows]
    chosen, rejected = sum(expected[0::2]), sum(expected[1::2])
    assert after["score_chosen"] == pytest.approx(chosen, abs=1e-4)
    assert after["score_rejected"] == pytest.approx(rejected, abs=1e-4)
    frozen = close_later(make_worker(Case(str(folder), role="reward_model")))
    layout = build_batch_layout(rows, range(len(rows)), 1, len(rows), 10_000, True, 0, False)
    scores = layout.join_columns([frozen.compute_scores(layout.rank_batches[0])])
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    again = close_later(make_worker(replace(REWARD, folder=str(folder))))
    assert again.evaluate(batch)["loss"] == pytest.approx(after["loss"], abs=1e-4)
