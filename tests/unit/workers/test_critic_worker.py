from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import Columns
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Critic, Model
from alphaapollo.models import sharding
from alphaapollo.models.sharding import local_tensor
from alphaapollo.workers.critic import CriticWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.training import Case, Gradients


def make_critic(case: Case, rank: int, num_ranks: int, address: str, seed: int = 0, **settings: Any) -> CriticWorker:
    sharding.MIN_UNIT = case.min_unit
    model = resolve_model(Model(path=case.folder, attention=case.attention, dtype=case.dtype), "cpu")
    placement = RankPlacement(rank, num_ranks, address, "cpu", 1, case.sequence_parallel)
    return CriticWorker(model, Critic(**settings), placement, 10, seed)


@pytest.fixture
def make(model_folder, close_later) -> Callable[..., tuple[CriticWorker, Columns]]:
    """Start a critic and load its batch. Returns it and its columns."""

    def make_loaded(name: str = "qwen3", seed: int = 0, dtype: str = "auto", **settings: Any) -> Any:
        case = Case(str(model_folder(name)), max_tokens=40, dtype=dtype)
        worker, batch = close_later(make_critic(case, 0, 1, "", seed, **settings)), training.make_batch(case, 1)
        worker.load_batch(batch.rank_batches[0])
        return worker, training.make_columns(case, batch, 0)

    return make_loaded


def test_values_are_the_head_on_the_states_before_each_response_token(make, model_folder):
    worker, _ = make("llama")
    plain, head = training.load_plain(model_folder("llama")).base_model, worker.model.value_head
    values = worker.compute_values()
    for ids, start, part, _ in training.iterate_rows(worker.batch.rows):
        with torch.no_grad():
            states = plain(ids[None]).last_hidden_state[0, start - 1 : -1]
            expected = states @ head.weight.full_tensor()[0] + head.bias.full_tensor()
        np.testing.assert_allclose(values[part], expected.numpy(), atol=1e-6)


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


def critic_gradients(rank: int, num_ranks: int, address: str, case: Case) -> tuple[np.ndarray, Gradients]:
    worker = make_critic(case, rank, num_ranks, address)
    recorded = training.record_gradients(worker)
    own, shares = case.share(rank, num_ranks)
    batch = training.make_batch(case, shares)
    worker.load_batch(batch.rank_batches[own])
    values = worker.compute_values()
    metrics = worker.update(training.make_columns(case, batch, own))
    worker.close()
    return values, (recorded[0], metrics)


def test_values_and_gradients_are_the_same_in_any_layout_and_on_two_ranks(model_folder):
    """Also with sequence parallelism, padded and packed."""
    case = Case(str(model_folder("qwen3")))
    expected = critic_gradients(0, 1, "", case)[1]
    packed = replace(case, attention="sdpa", max_tokens=60)
    shared = [replace(packed, sequence_parallel=2), replace(case, max_tokens=60, sequence_parallel=2)]
    cases = [replace(case, max_tokens=40), *shared]
    training.assert_same(critic_gradients(0, 1, "", packed)[1], expected)
    for distributed, *rank in run_ranks(training.call_for_each, 2, critic_gradients, cases):
        training.assert_same(distributed[1], expected)
        for one, (values, found) in zip(shared, rank, strict=True):
            own_values, _ = critic_gradients(0, 1, "", replace(one, sequence_parallel=1))
            np.testing.assert_allclose(values, own_values, atol=1e-6)
            training.assert_same(found, expected)


def test_checkpoint_restores_the_values(make, tmp_path: Path):
    worker, columns = make(optim={"lr": 1e-2}, cliprange_value=None)
    losses = [worker.update(columns)["critic/vf_loss"] for _ in range(6)]
    assert losses[-1] < 0.7 * losses[0]
    worker.save(str(tmp_path / "saved"))
    resumed, _ = make(seed=5)
    resumed.load(str(tmp_path / "saved"))
    np.testing.assert_array_equal(resumed.compute_values(), worker.compute_values())
    assert resumed.state.num_steps == 6


def test_bad_steps_stop_or_are_skipped_and_damaged_weights_are_not_saved(make, tmp_path: Path):
    worker, columns = make()
    bad = replace(columns, returns=np.full_like(columns.returns, np.inf))
    with pytest.raises(FloatingPointError, match=r"critic.*critic\.optim\.lr=1e-06"):
        worker.update(bad)
    assert worker.update(bad, skip_bad_step=True)["critic/steps_skipped"] == 1
    assert worker.update(columns)["critic/steps_skipped"] == 0
    worker.save(str(tmp_path / "saved"))
    local_tensor(worker.model.value_head.weight.data)[0, 0] = np.nan
    with pytest.raises(FloatingPointError, match=r"critic's .* not finite"):
        worker.save(str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()
