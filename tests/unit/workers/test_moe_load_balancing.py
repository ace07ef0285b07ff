"""Mixture of experts on several ranks: load-balancing loss, forced experts, metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import Model, SftConfig
from alphaapollo.models.moe_routing import ROUTED_EXPERTS
from alphaapollo.workers.finetuning_worker import SftWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.unit.tiny import build_model
from tests.unit.workers import training
from tests.unit.workers.training import Case


def case_of(folder: object, **more: Any) -> Case:
    actor = {"entropy_coeff": 0.1}
    return Case(str(folder), actor, "sdpa", aux=0.5, replay=True, **more)


@pytest.mark.parametrize("attention", ["padded", "sdpa"])
def test_loss_is_that_of_the_complete_mini_batch(model_folder, attention: str):
    """In one micro-batch it is transformers' loss over all tokens of the rows, prompts included."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    case = replace(case_of(model_folder("qwen3_moe")), replay=False, attention=attention)
    with_loss, metrics = training.gradients(0, 1, "", case)
    without, plain = training.gradients(0, 1, "", replace(case, aux=0.0))
    logits = []
    model = build_model("qwen3_moe")
    training.scale_weights(model, 1.1)  # as gradients() does
    batch = training.make_batch(case, 1).rank_batches[0].rows
    for ids, *_ in training.iterate_rows(batch):
        logits.append(model(ids[None], output_router_logits=True).router_logits)
    layers = tuple(torch.cat([row[layer] for row in logits]) for layer in range(2))
    expected = load_balancing_loss_func(layers, 4, 2)
    expected.backward()
    assert metrics["actor/router_aux_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert "actor/router_aux_loss" not in plain and metrics["actor/loss"] == pytest.approx(plain["actor/loss"])
    name = "model.model.layers.0.mlp.gate.weight"
    assert model.model.layers[0].mlp.gate.weight.grad is not None
    wanted = 0.5 * model.model.layers[0].mlp.gate.weight.grad.numpy()
    np.testing.assert_allclose(with_loss[name] - without[name], wanted, rtol=1e-3, atol=1e-5)
    assert np.abs(wanted).max() > 1e-3


def test_ranks_change_nothing(model_folder):
    """Two ranks with data or sequence parallelism, padded or packed, one rank with a dummy; layers gathered one by one,
    with gradient checkpointing."""
    packed = case_of(model_folder("qwen3_moe"))
    cases = [
        packed,
        replace(packed, sequence_parallel=2),
        replace(packed, attention="padded", sequence_parallel=2, checkpointing=True),
        replace(packed, min_unit=10**9, checkpointing=True),
        replace(packed, num_rows=1),
    ]
    assert training.alone(packed)[1]["actor/router_differs"] > 0.1
    training.compare_ranks_with_one(cases)


def test_a_micro_batch_is_weighted_by_its_tokens(model_folder):
    """Each micro-batch has its own f_e; the loss is their mean, weighted by tokens."""
    case = case_of(model_folder("qwen3_moe"), max_tokens=40)
    _, metrics = training.gradients(0, 1, "", case)
    (mini_batch,) = training.make_batch(case, 1).rank_batches[0].mini_batches
    assert len(mini_batch.micro_batches) > 2
    rows = training.make_batch(case, 1).rank_batches[0].rows
    total, tokens = 0.0, float(rows.lengths.sum())
    for positions in mini_batch.micro_batches:
        one = replace(case, num_rows=len(positions), order=None, max_tokens=10_000)
        total += own_loss(one, rows.select(positions)) * float(rows.lengths[positions].sum()) / tokens
    assert metrics["actor/router_aux_loss"] == pytest.approx(total, rel=1e-5)


def own_loss(case: Case, rows: Any) -> float:
    """Loss of one micro-batch with the experts of its rows."""
    from alphaapollo.models.moe_routing import RouterHooks, load_balancing_loss

    model = build_model("qwen3_moe")
    training.scale_weights(model, 1.1)  # as gradients() does
    routers = RouterHooks.wrap_routers(model)
    assert routers is not None
    routers.needs_probabilities = True
    counts, shares = torch.zeros(4), torch.zeros(4)
    for start, end in zip(rows.token_offsets[:-1], rows.token_offsets[1:], strict=True):
        experts = torch.from_numpy(rows.columns[ROUTED_EXPERTS][start:end])
        routing = routers.start_recording(torch.ones(end - start, dtype=torch.bool), {ROUTED_EXPERTS: experts})
        model(torch.from_numpy(rows.token_ids[start:end])[None])
        assert routing.probabilities is not None
        counts, shares = counts + routing.counts.sum(0), shares + routing.probabilities.detach()
    return float(load_balancing_loss(counts, shares, counts.sum() / 2))


def test_the_policy_uses_the_engines_experts_and_the_reference_its_own(start, model_folder):
    case, found = replace(case_of(model_folder("qwen3_moe"), needs_reference=True), aux=0.0), []
    for replay in (True, False):
        worker, columns = start(case, replay=replay)
        found.append((worker.compute_log_probs(), worker.compute_log_probs("reference")))
        metrics = worker.update(replace(columns, old_logprobs=None))
        assert ("actor/router_differs" in metrics) is replay
        np.testing.assert_allclose(worker.get_old_log_probs(), found[-1][0], atol=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-6)
    assert np.abs(found[0][0] - found[1][0]).max() > 1e-2


def test_sft_has_the_same_metrics(model_folder, close_later):
    case = case_of(model_folder("qwen3_moe"), num_rows=6)
    model = resolve_model(Model(path=case.folder, router_aux_loss_coef=0.5), "cpu")
    worker = close_later(SftWorker(SftConfig(), model, RankPlacement(0, 1, "", "cpu", 1), 10))
    metrics = worker.step(
        training.make_batch(replace(case, attention="padded", replay=False), 1).rank_batches[0]
    ).metrics
    assert metrics["router_aux_loss"] > 2.0 and metrics["expert_load_max"] > 1.0
    assert 0.0 <= metrics["expert_dead"] < 1.0 and "router_differs" not in metrics
