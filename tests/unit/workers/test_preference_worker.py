"""Preference training compared with plain transformers. test_layouts.py has all layouts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.preference_losses import AnswerBatch, get_preference_loss
from alphaapollo.config.schema import DpoConfig
from alphaapollo.types import Row
from tests.unit.tiny import run_ranks
from tests.unit.workers.layouts import assert_gradients_close, compute
from tests.unit.workers.preferences import assign_reference, distribute, make_examples, make_pairs
from tests.unit.workers.training import Case, gradients_of, load_plain, make_worker, train_by_hand


def by_transformers(case: Case) -> tuple[dict[str, np.ndarray], float]:
    """Loss and gradient of the mean over all pairs."""
    reference, policy = load_plain(case.folder), load_plain(case.folder, 1.1)

    def logp(model: torch.nn.Module, row: Row) -> torch.Tensor:
        ids, mask = torch.tensor(row.token_ids), torch.tensor(row.action_mask)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return (logprobs * mask[1:]).sum().double()

    config = DpoConfig(**case.settings).preference
    losses, kl = [], torch.zeros((), dtype=torch.float64)
    examples = make_examples(case)
    with torch.no_grad():
        unrelated = [one.unrelated_answer for one in examples if one.unrelated_answer is not None]
        if unrelated:
            kl = torch.stack([logp(policy, row) - logp(reference, row) for row in unrelated]).mean()
    for one in examples:
        with torch.no_grad():
            ref = torch.stack([logp(reference, row) for row in one.rows])
        own = torch.stack([logp(policy, row) for row in one.rows])
        lengths = torch.tensor([sum(row.action_mask) for row in one.rows])
        answers = AnswerBatch(own, lengths, torch.tensor(one.is_good), ref, kl)
        losses.append(get_preference_loss(config.loss)(answers, config).losses)
    mean = torch.cat(losses).mean()
    mean.backward()
    return gradients_of(policy), mean.item()


# Chosen for what they read: margins, one side each, means, a target besides, no reference, single answers.
LOSSES = [
    {"loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.1, "sft_coef": 0.2},
    {"loss": "ipo_mean"},
    {"loss": "apo_zero"},
    {"loss": "orpo"},
    {"loss": "slic", "sft_coef": 0.1, "slic_delta": 30.0},
    {"loss": "kto", "kto_desirable_weight": 1.5},
]


@pytest.mark.parametrize("preference", LOSSES, ids=lambda keys: "-".join(map(str, keys.values())))
def test_gradients_are_those_of_transformers(locate, preference: dict[str, Any]):
    case = locate(Case("qwen3", role="preference", settings={"preference": preference}, max_tokens=40))
    (found,), (gradients, loss) = compute(0, 1, "", [case]), by_transformers(case)
    assert found.metrics["loss"] / found.metrics["examples"] == pytest.approx(loss, rel=1e-4)
    assert_gradients_close(found.gradients, gradients)


def test_with_lora_the_reference_is_the_model_without_its_adapters(locate, close_later):
    case, examples = locate(Case("qwen3", role="preference", lora_rank=2)), make_pairs()
    worker = close_later(make_worker(case))
    assign_reference(worker, case, examples)
    before = [pair.ref_logps for pair in examples]
    train_by_hand(worker.model)
    assign_reference(worker, case, examples)
    assert [pair.ref_logps for pair in examples] == before
    assert all(".lora_" in name for name in compute(0, 1, "", [case])[0].gradients)


def test_before_the_first_step_policy_and_reference_are_equal(locate, close_later):
    case, examples = locate(Case("qwen3", role="preference", max_tokens=50, shares_prompts=True)), make_pairs()
    worker = close_later(make_worker(case))
    reference_rows = assign_reference(worker, case, examples)
    (batch,) = distribute(case, examples)
    sums = worker.evaluate(batch)
    assert sums["loss"] / 5 == pytest.approx(np.log(2.0), abs=1e-6)
    assert sums["reward_chosen"] == pytest.approx(0.0, abs=1e-5)
    assert (sums["a/examples"], sums["b/examples"], sums["examples"]) == (3, 2, 5)
    worker.step(batch)
    after = worker.evaluate(batch)
    assert after["loss"] < sums["loss"] and after["reward_chosen"] > after["reward_rejected"]
    with pytest.raises(AssertionError, match="a trained model"):
        worker.compute_ref_log_probs(reference_rows)


def compute_digests(rank: int, num_ranks: int, address: str, case: Case) -> list[int]:
    """This rank's parts of the digests of the base model and of the trained weights."""
    with closing(make_worker(case, rank, num_ranks, address)) as worker:
        trained = [digest for digest, _ in worker.compute_state_fingerprints().values() if digest]
        return [worker.compute_weights_digest(), *trained]


def test_digests_do_not_depend_on_ranks(locate):
    """Two copies of the model, each on two ranks: the first copy counts."""
    case = locate(Case("qwen3", role="preference", lora_rank=2))
    in_copies = replace(case, settings={"fsdp_config": {"fsdp_size": 2}})
    (*first, third, fourth) = run_ranks(compute_digests, 4, in_copies)
    assert [sum(parts) % 2**64 for parts in zip(*first, strict=True)] == compute_digests(0, 1, "", case)
    assert third == fourth == [0]
