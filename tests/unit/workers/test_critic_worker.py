from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Critic, Model
from alphaapollo.models import sharding
from alphaapollo.models.sharding import local_tensor
from alphaapollo.workers.critic import CriticWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.matrices import join
from tests.unit.tiny import free_address, run_ranks
from tests.unit.workers.training import Case, make_batch, make_columns, record_gradients


def make_critic(case: Case, rank: int, num_ranks: int, address: str, seed: int = 0, **settings: Any) -> CriticWorker:
    sharding.MIN_UNIT = case.min_unit
    model = resolve_model(Model(path=case.folder, attention=case.attention), "cpu")
    return CriticWorker(model, Critic(**settings), RankPlacement(rank, num_ranks, address, "cpu", 1), 10, seed)


@pytest.fixture
def make(model_folder) -> Iterator[Any]:
    workers: list[CriticWorker] = []

    def worker(name: str = "qwen3", seed: int = 0, **settings: Any) -> CriticWorker:
        workers.append(make_critic(Case(str(model_folder(name))), 0, 1, free_address(), seed, **settings))
        return workers[-1]

    yield worker
    for one in workers:
        one.close()


def test_values_are_the_head_on_the_states_before_each_response_token(make, model_folder):
    from transformers import AutoModelForCausalLM

    case = Case(str(model_folder("llama")), max_tokens=40)
    worker = make("llama")
    rank = make_batch(case, 1).rank_batches[0]
    worker.load_batch(rank)
    values = worker.compute_values()
    plain = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).eval().base_model
    head = worker.model.value_head
    rows = rank.rows
    for row in (0, 6):
        ids = torch.from_numpy(rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]])[None]
        with torch.no_grad():
            states = plain(ids).last_hidden_state[0, rows.response_starts[row] - 1 : -1]
            expected = states @ head.weight.full_tensor()[0] + head.bias.full_tensor()
        ours = values[rows.response_offsets[row] : rows.response_offsets[row + 1]]
        np.testing.assert_allclose(ours, expected.numpy(), atol=1e-6)


def test_values_are_float32_if_the_decoder_computes_in_bfloat16(model_folder):
    case = Case(str(model_folder("llama")), max_tokens=40)
    placement = RankPlacement(0, 1, free_address(), "cpu", 1)
    worker = CriticWorker(
        Model(path=case.folder, attention="padded", dtype="bfloat16"), Critic(), placement, 10, seed=0
    )
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    values = torch.from_numpy(worker.compute_values())
    assert (values != values.bfloat16().float()).float().mean() > 0.9
    assert worker.update(make_columns(case, batch, 0))["critic/grad_norm"] > 0
    worker.close()


def test_the_new_head_depends_on_the_seed(make):
    weights = [make(seed=seed).model.value_head.weight.full_tensor() for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].abs().max() < 4 / 33


def test_loss_is_the_mean_over_action_tokens(make, model_folder):
    """Values near zero, no clipping: half the mean of squared returns."""
    case = Case(str(model_folder("qwen3")), max_tokens=30)
    worker = make(cliprange_value=None)
    worker.model.value_head.weight.data.zero_()
    record_gradients(worker)
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    columns = make_columns(case, batch, 0)
    metrics = worker.update(columns)
    actions = batch.rank_batches[0].rows.action_mask.astype(bool)
    assert columns.returns is not None
    returns = columns.returns[actions]
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 * (returns**2).mean(), rel=1e-5)
    assert metrics["critic/values/mean"] == 0.0
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - (returns**2).mean() / returns.var(), rel=1e-4)


def test_updates_move_values_towards_returns(make, model_folder):
    case = Case(str(model_folder("qwen3")))
    worker = make(optim={"lr": 1e-2}, cliprange_value=None)
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    columns = make_columns(case, batch, 0)
    losses = [worker.update(columns)["critic/vf_loss"] for _ in range(6)]
    assert losses[-1] < 0.7 * losses[0]


def critic_gradients(rank: int, num_ranks: int, address: str, case: Case) -> tuple[dict[str, np.ndarray], np.ndarray]:
    worker = make_critic(case, rank, num_ranks, address)
    recorded = record_gradients(worker)
    batch = make_batch(case, num_ranks)
    worker.load_batch(batch.rank_batches[rank])
    values = worker.compute_values()
    worker.update(make_columns(case, batch, rank))
    worker.close()
    return recorded[0], join(batch, [values]) if num_ranks == 1 else values


@pytest.mark.timeout(120)
def test_same_gradients_in_any_layout_and_on_two_ranks(model_folder):
    case = Case(str(model_folder("qwen3")))
    expected, _ = critic_gradients(0, 1, free_address(), case)
    others = [critic_gradients(0, 1, free_address(), Case(case.folder, attention="sdpa", max_tokens=30))]
    others += run_ranks(critic_gradients, 2, Case(case.folder, max_tokens=40))
    for ours, _ in others:
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(ours[name], value, atol=1e-6, rtol=1e-4, err_msg=name)


def test_checkpoint_restores_the_values(make, model_folder, tmp_path: Path):
    case = Case(str(model_folder("qwen3")))
    batch = make_batch(case, 1)
    worker = make(optim={"lr": 1e-2})
    worker.load_batch(batch.rank_batches[0])
    worker.update(make_columns(case, batch, 0))
    worker.save(str(tmp_path / "saved"))
    resumed = make(seed=5)
    resumed.load(str(tmp_path / "saved"))
    resumed.load_batch(batch.rank_batches[0])
    np.testing.assert_array_equal(resumed.compute_values(), worker.compute_values())
    assert resumed.state.num_steps == 1


def test_bad_steps_stop_or_are_skipped_and_damaged_weights_are_not_saved(make, model_folder, tmp_path: Path):
    case, worker = Case(str(model_folder("qwen3"))), make()
    batch = make_batch(case, 1)
    worker.load_batch(batch.rank_batches[0])
    columns = make_columns(case, batch, 0)
    bad = replace(columns, returns=np.full_like(columns.returns, np.inf))
    with pytest.raises(FloatingPointError, match=r"the critic.s gradient norm is .*critic\.optim\.lr=1e-06"):
        worker.update(bad)
    assert worker.update(bad, skip_bad_step=True)["critic/steps_skipped"] == 1
    assert worker.update(columns)["critic/steps_skipped"] == 0
    worker.save(str(tmp_path / "saved"))
    local_tensor(worker.model.value_head.weight.data)[0, 0] = np.nan
    with pytest.raises(FloatingPointError, match=r"of the critic's .* parameters are not finite"):
        worker.save(str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()
