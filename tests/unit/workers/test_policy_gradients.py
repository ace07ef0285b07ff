"""The loss does not depend on micro-batches, layout, ranks or recomputation, and equals the explicit formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.policy_losses import policy_loss_names
from alphaapollo.config.schema import Actor
from tests.unit.plain import entropy, kl_full
from tests.unit.tiny import free_address, run_ranks
from tests.unit.workers import training
from tests.unit.workers.training import Case, Gradients

RICH = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3+"}
FULL = RICH | {"kl_loss_type": "full", "loss_agg_mode": "seq-mean-token-mean"}


@pytest.mark.parametrize("actor", [RICH, FULL], ids=["ppo", "full_kl"])
def test_same_gradients_in_any_layout(model_folder, actor: dict):
    case = Case(str(model_folder("qwen3")), actor, needs_reference=actor is FULL)
    training.check_layouts_compute_the_same(case)


LOSSES = {name: Case("", {"policy_loss": {"loss_mode": name}}) for name in policy_loss_names()} | {
    "corrected by token": Case("", correction={"method": "tis", "level": "token"}),
    "deepseek_v32": Case(
        "",
        {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "unbiased"},
        correction={"off_policy_mask_threshold": 0.1},
    ),
    "corrected by row": Case(
        "",
        {"policy_loss": {"loss_mode": "sequence_ppo"}},
        correction={"method": "mask", "level": "geometric"},
    ),
}
LAYOUTS: dict[str, dict] = {  # against all rows in one padded micro-batch
    "one row each": {"max_tokens": 1},
    "a few rows each, shuffled": {"max_tokens": 40, "order": 1},
    "all, shuffled": {"order": 2},
    "packed": {"attention": "sdpa"},
    "packed, a few rows each, shuffled": {"attention": "sdpa", "max_tokens": 40, "order": 3},
    "two ranks": {"max_tokens": 1, "order": 4},
}


def rough_cases(folder: str, layout: dict) -> list[Case]:
    return [replace(case, folder=folder, num_rows=7, rough=True, **layout) for case in LOSSES.values()]


@pytest.fixture(scope="module")
def rough_gradients(model_folder) -> dict[str, list[dict[str, Gradients]]]:
    """Gradients of every loss by its name, in every layout, on every rank. The first layout is the baseline."""
    folder, found = str(model_folder("qwen3")), {}
    for attention in ("padded", "sdpa"):
        layouts = {name: one for name, one in LAYOUTS.items() if one.get("attention", "padded") == attention}
        layouts.pop("two ranks", None)
        if attention == "padded":
            layouts = {"whole": {}} | layouts
        cases = [case for layout in layouts.values() for case in rough_cases(folder, layout)]
        results = iter(training.gradients_of_losses(0, 1, free_address(), cases))
        found |= {name: [dict(zip(LOSSES, results, strict=False))] for name in layouts}
    cases = rough_cases(folder, LAYOUTS["two ranks"])
    steps = [step for rank in training.make_batch(cases[0], 2).rank_batches for step in rank.mini_batches]
    assert any([] in step.micro_batches for step in steps), "one rank should have an empty micro-batch"
    ranks = run_ranks(training.gradients_of_losses, 2, cases, timeout=100)
    return found | {"two ranks": [dict(zip(LOSSES, results, strict=True)) for results in ranks]}


def same(ours: Gradients, expected: Gradients) -> bool:
    """Metrics within 1e-4, and each entry of a gradient within 1e-4 of itself or 1e-5 of the largest, in float32."""
    largest = max(np.abs(gradient).max() for gradient in expected[0].values())
    assert largest > 1e-4
    return ours[1] == pytest.approx(expected[1], rel=1e-4, abs=1e-6) and all(
        np.allclose(ours[0][name], gradient, rtol=1e-4, atol=1e-5 * largest) for name, gradient in expected[0].items()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_with_rows_of_one_token_and_of_no_weight(rough_gradients, loss: str, layout: str):
    expected = rough_gradients["whole"][0][loss]
    for rank in rough_gradients[layout]:
        assert same(rank[loss], expected)


def test_same_gradients_on_two_ranks(model_folder):
    """Also if layers are not gathered one by one, and of experts with a rank without rows, which computes a dummy."""
    case = Case(str(model_folder("qwen3")), RICH, max_tokens=40, checkpointing=True, min_unit=10**9)
    lonely = Case(str(model_folder("qwen3_moe")), RICH, num_rows=1)
    training.compare_ranks_with_one([case, lonely])


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_equals_the_explicit_loss_on_plain_logits(model_folder, name: str):
    """PPO's clip, full KL and entropy, token-mean, row by row through the plain Hugging Face model."""
    folder = str(model_folder(name))
    case = Case(folder, RICH | {"kl_loss_type": "full"}, needs_reference=True)
    ours, metrics = training.alone(case)
    policy, reference = training.load_plain(folder, 1.1), training.load_plain(folder)
    batch = training.make_batch(case, 1)
    rows, columns = batch.rank_batches[0].rows, training.make_columns(case, batch, 0)
    assert columns.advantages is not None and columns.old_logprobs is not None
    actor, terms = Actor(**case.actor), []
    for ids, start, part, mask in training.iterate_rows(rows):
        logits = policy(ids[None]).logits[0, start - 1 : -1] / 0.9
        ref_logits = reference(ids[None]).logits[0, start - 1 : -1].detach() / 0.9
        logp = logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]
        ratio = (logp - torch.from_numpy(columns.old_logprobs[part].copy())).exp()
        advantages = torch.from_numpy(columns.advantages[part].copy())
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = loss + actor.kl_loss_coef * kl_full(logits, ref_logits) - actor.entropy_coeff * entropy(logits)
        terms.append(loss[mask])
    total = torch.cat(terms).mean()
    total.backward()
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-5)
    training.assert_close(ours, training.gradients_of(policy), atol=2e-6, rtol=1e-3)
