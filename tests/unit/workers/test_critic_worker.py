from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from alphaapollo.batching.batch import Columns
from alphaapollo.workers.critic import CriticWorker
from tests.unit.workers import training
from tests.unit.workers.training import Case


@pytest.fixture
def make(start) -> Callable[..., tuple[CriticWorker, Columns]]:
    """Start a critic and load its batch. Returns it and its columns."""

    def make_loaded(name: str = "qwen3", seed: int = 0, dtype: str = "auto", **settings: Any) -> Any:
        case = Case(name, role="critic", max_tokens=40, dtype=dtype, settings=settings)
        return start(case, arguments={"seed": seed})

    return make_loaded


def test_values_are_float32_if_the_decoder_computes_in_bfloat16(make):
    worker, columns = make("llama", dtype="bfloat16")
    values = torch.from_numpy(worker.compute_values())
    assert (values != values.bfloat16().float()).float().mean() > 0.9
    assert worker.update(columns)["critic/grad_norm"] > 0


def test_the_new_head_depends_on_the_seed(make):
    weights = [make(seed=seed)[0].model.value_head.weight.full_tensor() for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].abs().max() < 4 / 33


def test_loss_is_the_mean_over_action_tokens(make):
    """Values near zero, no clipping: half the mean of squared returns."""
    worker, columns = make(cliprange_value=None)
    worker.model.value_head.weight.data.zero_()
    training.record_gradients(worker)
    metrics = worker.update(columns)
    actions = worker.batch.rows.action_mask.astype(bool)
    assert columns.returns is not None
    returns = columns.returns[actions]
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 * (returns**2).mean(), rel=1e-5)
    assert metrics["critic/values/mean"] == 0.0
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - (returns**2).mean() / returns.var(), rel=1e-4)


def test_means_and_deviations_are_those_of_action_tokens(make):
    worker, columns = make(optim={"lr": 1e-12})
    worker.model.value_head.weight.data.fill_(0.1)
    values = worker.compute_values()
    metrics, actions = worker.update(columns), worker.batch.rows.action_mask.astype(bool)
    for name, column in (("values", values), ("returns", columns.returns)):
        assert metrics[f"critic/{name}/mean"] == pytest.approx(column[actions].mean(), rel=1e-4, abs=1e-6)
        assert metrics[f"critic/{name}/std"] == pytest.approx(column[actions].std(), rel=1e-4)
