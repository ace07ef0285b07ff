"""Mixture of experts: load-balancing loss, forced experts, metrics. test_layouts.py has several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.tiny import build_model
from tests.unit.workers import training
from tests.unit.workers.layouts import compute
from tests.unit.workers.training import Case


def case_of(folder: object, **more: Any) -> Case:
    actor = {"entropy_coeff": 0.1}
    return Case(str(folder), actor, "sdpa", aux=0.5, replay=True, **more)


@pytest.mark.parametrize("attention", ["padded", "sdpa"])
def test_loss_is_that_of_the_complete_mini_batch(model_folder, attention: str):
    """In one micro-batch it is transformers' loss over all tokens of the rows, prompts included."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    case = replace(case_of(model_folder("qwen3_moe")), replay=False, attention=attention)
    (found,), (without,) = compute(0, 1, "", [case]), compute(0, 1, "", [replace(case, aux=0.0)])
    logits = []
    model = build_model("qwen3_moe")
    training.scale_weights(model, 1.1)  # as compute() does
    batch = training.make_batch(case).rank_batches[0].rows
    for ids, *_ in training.iterate_rows(batch):
        logits.append(model(ids[None], output_router_logits=True).router_logits)
    layers = tuple(torch.cat([row[layer] for row in logits]) for layer in range(2))
    expected = load_balancing_loss_func(layers, 4, 2)
    expected.backward()
    assert found.metrics["actor/router_aux_loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    assert "actor/router_aux_loss" not in without.metrics
    assert found.metrics["actor/loss"] == pytest.approx(without.metrics["actor/loss"])
    name = "model.model.layers.0.mlp.gate.weight"
    assert model.model.layers[0].mlp.gate.weight.grad is not None
    wanted = 0.5 * model.model.layers[0].mlp.gate.weight.grad.numpy()
    np.testing.assert_allclose(found.gradients[name] - without.gradients[name], wanted, rtol=1e-3, atol=1e-5)
    assert np.abs(wanted).max() > 1e-3


def test_the_policy_uses_the_engines_experts_and_the_reference_its_own(start, model_folder):
    case, found = replace(case_of(model_folder("qwen3_moe"), needs_reference=True), aux=0.0), []
    for replay in (True, False):
        worker, columns = start(case, replay=replay)
        found.append((worker.compute_log_probs(), worker.compute_log_probs("reference")))
        metrics = worker.update(replace(columns, old_logprobs=None))
        assert metrics["actor/router_differs"] > 0.1 if replay else "actor/router_differs" not in metrics
        np.testing.assert_allclose(worker.get_old_log_probs(), found[-1][0], atol=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-6)
    assert np.abs(found[0][0] - found[1][0]).max() > 1e-2


def test_sft_has_the_same_metrics(start):
    worker, _ = start(Case("qwen3_moe", role="sft", aux=0.5, num_rows=6))
    metrics = worker.step(worker.batch).metrics
    assert metrics["router_aux_loss"] > 2.0 and metrics["expert_load_max"] > 1.0
    assert 0.0 <= metrics["expert_dead"] < 1.0 and "router_differs" not in metrics
