"""The loss does not depend on micro-batches, layout, ranks or recomputation; and it is the right one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.entropy import entropy
from alphaapollo.algorithms.kl import kl_full
from alphaapollo.config.schema import Actor
from tests.unit.tiny import free_address, run_ranks
from tests.unit.workers.training import Case, gradients, gradients_of_cases, make_batch, make_columns

RICH = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3+"}
FULL = RICH | {"kl_loss_type": "full", "loss_agg_mode": "seq-mean-token-mean"}


def assert_same(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-6) -> None:
    assert ours.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], atol=tolerance, rtol=1e-4, err_msg=name)


def alone(case: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    return gradients(0, 1, free_address(), case)


@pytest.mark.parametrize(
    "actor", [RICH, FULL, {"policy_loss": {"loss_mode": "gspo"}}], ids=["ppo", "full_kl", "sequence_level"]
)
def test_same_gradients_however_the_batch_is_cut(model_folder, actor: dict):
    case = Case(str(model_folder("qwen3")), actor, needs_ref=actor is FULL)
    expected, figures = alone(case)
    assert max(np.abs(gradient).max() for gradient in expected.values()) > 1e-3
    for other in (
        replace(case, max_tokens=40),
        replace(case, max_tokens=1),
        replace(case, attention="sdpa", max_tokens=60),
        replace(case, checkpointing=True),
        replace(case, min_unit=10**9),
    ):
        ours, own_figures = alone(other)
        assert_same(ours, expected)
        assert own_figures == pytest.approx(figures, rel=1e-5, abs=1e-6)


@pytest.mark.timeout(240)
def test_same_gradients_on_two_ranks(model_folder):
    """Also in several micro-batches, with a full KL, and where one rank has no row: it computes a dummy of weight 0."""
    rich, full = (Case(str(model_folder("qwen3")), actor, needs_ref=actor is FULL) for actor in (RICH, FULL))
    lonely = Case(str(model_folder("qwen3_moe")), RICH, num_rows=1)
    cases = [rich, replace(rich, max_tokens=40, checkpointing=True), replace(rich, min_unit=10**9), full, lonely]
    ranks = run_ranks(gradients_of_cases, 2, cases, [free_address() for _ in cases], timeout=200)
    for index, case in enumerate(cases):
        expected, figures = alone(case)
        for rank in ranks:
            ours, own_figures = rank[index]
            assert_same(ours, expected)
            assert own_figures == pytest.approx(figures, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_equals_the_loss_written_out_on_plain_logits(model_folder, name: str):
    """PPO's clip, full KL and entropy, token-mean, row by row through the plain Hugging Face model."""
    from transformers import AutoModelForCausalLM

    folder = str(model_folder(name))
    case = Case(folder, RICH | {"kl_loss_type": "full"}, needs_ref=True)
    ours, figures = alone(case)

    policy, reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    batch = make_batch(case, 1)
    rows, columns = batch.rank_batches[0].rows, make_columns(case, batch, 0)
    assert columns.advantages is not None and columns.old_logprobs is not None
    actor, terms = Actor(**case.actor), []
    for row in range(len(rows)):
        ids = torch.from_numpy(rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]])
        start, part = int(rows.response_starts[row]), slice(*rows.response_offsets[row : row + 2])
        logits = policy(ids[None]).logits[0, start - 1 : -1] / 0.9
        ref_logits = reference(ids[None]).logits[0, start - 1 : -1].detach() / 0.9
        logp = logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]
        ratio = (logp - torch.from_numpy(columns.old_logprobs[part].copy())).exp()
        advantages = torch.from_numpy(columns.advantages[part].copy())
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = loss + actor.kl_loss_coef * kl_full(logits, ref_logits) - actor.entropy_coeff * entropy(logits)
        terms.append(loss[torch.from_numpy(rows.action_mask[part]).bool()])
    total = torch.cat(terms).mean()
    total.backward()
    assert figures["actor/loss"] == pytest.approx(total.item(), rel=1e-5)
    for parameter_name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        expected = parameter.grad.numpy()
        np.testing.assert_allclose(ours[f"model.{parameter_name}"], expected, atol=2e-6, rtol=1e-3)
