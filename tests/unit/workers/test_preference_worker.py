"""Preference training compared with plain transformers, and between layouts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.preference_losses import AnswerBatch, get_preference_loss
from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.packing import (
    PreferenceBatch,
    collect_row_values,
    distribute_preference_examples,
    distribute_rows_for_reference,
)
from alphaapollo.config.resolve import resolve_model
from alphaapollo.config.schema import DpoConfig
from alphaapollo.data.preference_examples import PreferenceExample, make_unrelated_answers
from alphaapollo.finetuning.dpo import assign_reference_logps
from alphaapollo.models import sharding
from alphaapollo.types import Row
from alphaapollo.workers.preference import PreferenceWorker
from alphaapollo.workers.process_group import RankPlacement
from tests.unit.tiny import VOCABULARY, run_ranks
from tests.unit.workers.training import call_for_each, gradients_of, load_plain, record_gradients, scale_weights

PAIRS = 5


@dataclass(frozen=True)
class Case:
    """Layout and settings of one batch."""

    folder: str
    preference: dict[str, Any] = field(default_factory=dict)
    attention: str = "padded"
    max_tokens: int = 10_000
    share: bool = False
    lora_rank: int = 0
    sequence_parallel: int = 1


def some_pairs(seed: int = 0) -> list[PreferenceExample]:
    """Pairs of answers of 2 to 8 tokens to prompts of 2 to 6 tokens, some with untrained tokens."""
    generator = np.random.default_rng(seed)
    pairs = []
    for index in range(PAIRS):
        prompt = generator.integers(2, VOCABULARY, generator.integers(2, 7)).tolist()
        answers = [generator.integers(2, VOCABULARY, generator.integers(2, 9)).tolist() for _ in range(2)]
        rows = [one_row(prompt, answer) for answer in answers]
        pairs.append(PreferenceExample(rows, [True, False], "ab"[index % 2]))
    return pairs


def one_row(prompt: list[int], answer: list[int]) -> Row:
    mask = [0] * len(prompt) + [1] * len(answer)
    if len(answer) > 4:
        mask[len(prompt) + 2] = 0
    return Row([*prompt, *answer], mask, [0.0] * len(mask), [len(mask) - 1])


def examples_of(case: Case) -> list[PreferenceExample]:
    """Pairs, or for KTO two single answers each."""
    pairs = some_pairs()
    if get_preference_loss(case.preference.get("loss", "sigmoid")).is_pairwise:
        return pairs
    rows = [row for pair in pairs for row in pair.rows]
    others = make_unrelated_answers(rows, 0, 100)
    return [
        PreferenceExample([row], [index % 2 == 0], "", unrelated_answer=other)
        for index, (row, other) in enumerate(zip(rows, others, strict=True))
    ]


def make_worker(case: Case, rank: int, num_ranks: int, address: str) -> PreferenceWorker:
    sharding.MIN_UNIT = 0
    config = DpoConfig(
        model={"path": case.folder, "attention": case.attention, "lora_rank": case.lora_rank},
        preference=case.preference,
        grad_clip=0.5,
        optim={"lr": 0.01},
    )
    placement = RankPlacement(rank, num_ranks, address, "cpu", 1, case.sequence_parallel)
    return PreferenceWorker(config, resolve_model(config.model, "cpu"), placement, 3)


def rank_batches(case: Case, examples: list[PreferenceExample], num_ranks: int) -> list[PreferenceBatch]:
    groups = num_ranks // case.sequence_parallel
    return distribute_preference_examples(examples, groups, case.max_tokens, case.attention == "padded", case.share)


def gradients(rank: int, num_ranks: int, address: str, case: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Gradients of one step by a policy that differs from its reference."""
    worker, examples = make_worker(case, rank, num_ranks, address), examples_of(case)
    if worker.preference_loss.needs_reference:
        assign_reference(worker, case, examples)
    if case.lora_rank:
        for name, parameter in worker.model.named_parameters():
            if ".lora_B." in name:
                parameter.data.fill_(0.05)
    else:
        scale_weights(worker.model, 1.1)
    recorded = record_gradients(worker)
    own = rank_batches(case, examples, num_ranks)[rank // case.sequence_parallel]
    done = worker.step(own)
    evaluated = worker.evaluate(own)
    assert evaluated == pytest.approx(done.metric_sums, rel=1e-6)
    worker.close()
    return recorded[0], done.metric_sums


def by_transformers(case: Case) -> tuple[dict[str, np.ndarray], float]:
    """Loss and gradient of the mean over all pairs."""
    reference, policy = load_plain(case.folder), load_plain(case.folder, 1.1)

    def logp(model: torch.nn.Module, row: Row) -> torch.Tensor:
        ids, mask = torch.tensor(row.token_ids), torch.tensor(row.action_mask)
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return (logprobs * mask[1:]).sum().double()

    config = DpoConfig(preference=case.preference).preference
    losses, kl = [], torch.zeros((), dtype=torch.float64)
    examples = examples_of(case)
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


def assert_alike(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 2e-4) -> None:
    """Compare gradients, relative to the largest of each parameter."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, atol=tolerance * scale + 1e-7, err_msg=name)


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
def test_gradients_are_those_of_transformers(model_folder, preference: dict[str, Any]):
    case = Case(str(model_folder("qwen3")), preference)
    expected, loss = by_transformers(case)
    for one in (
        case,
        Case(case.folder, preference, "sdpa", 40),
        Case(case.folder, preference, "padded", 60, share=True),
    ):
        found, sums = gradients(0, 1, "", one)
        assert sums["loss"] / sums["compared"] == pytest.approx(loss, rel=1e-4)
        assert_alike(found, expected)


def test_layout_and_ranks_change_nothing(model_folder):
    losses = [Case(str(model_folder("qwen3")), {"loss": loss}) for loss in ("sigmoid", "kto")]
    layouts: list[dict[str, Any]] = [{"max_tokens": 40}]
    layouts += [{"attention": "sdpa", "max_tokens": 50} | more for more in ({"share": True}, {"sequence_parallel": 2})]
    cases = [replace(loss, **layout) for loss in losses for layout in layouts]
    alone = [result for loss in losses for result in [gradients(0, 1, "", loss)] * len(layouts)]
    for results in run_ranks(call_for_each, 2, gradients, cases):
        for (found, sums), (expected, own_sums) in zip(results, alone, strict=True):
            assert sums == pytest.approx(own_sums, rel=1e-4)
            assert_alike(found, expected)


def test_with_lora_the_reference_is_the_model_without_its_adapters(model_folder, close_later):
    case, examples = Case(str(model_folder("qwen3")), lora_rank=2), some_pairs()
    worker = close_later(make_worker(case, 0, 1, ""))
    layout = distribute_rows_for_reference(examples, 1, case.max_tokens, True, case.share)
    before = worker.compute_ref_log_probs(layout.rank_batches[0])
    for name, parameter in worker.model.named_parameters():
        if ".lora_B." in name:
            parameter.data.fill_(0.05)
    np.testing.assert_array_equal(worker.compute_ref_log_probs(layout.rank_batches[0]), before)
    assert all(".lora_" in name for name in gradients(0, 1, "", case)[0])


def assign_reference(worker: PreferenceWorker, case: Case, examples: list[PreferenceExample]) -> RankBatch:
    """Assign the log-probs of the reference to examples. Returns the rows for which they were computed."""
    layout = distribute_rows_for_reference(examples, 1, case.max_tokens, worker.builder.padded, case.share)
    assign_reference_logps(examples, collect_row_values(layout, [worker.compute_ref_log_probs(layout.rank_batches[0])]))
    return layout.rank_batches[0]


def test_before_the_first_step_policy_and_reference_are_equal(model_folder, close_later):
    case, examples = Case(str(model_folder("qwen3")), max_tokens=50, share=True), some_pairs()
    worker = close_later(make_worker(case, 0, 1, ""))
    reference_rows = assign_reference(worker, case, examples)
    (batch,) = rank_batches(case, examples, 1)
    sums = worker.evaluate(batch)
    assert sums["loss"] / PAIRS == pytest.approx(np.log(2.0), abs=1e-6)
    assert sums["reward_chosen"] == pytest.approx(0.0, abs=1e-5)
    assert (sums["a/compared"], sums["b/compared"], sums["compared"]) == (3, 2, 5)
    worker.step(batch)
    after = worker.evaluate(batch)
    assert after["loss"] < sums["loss"] and after["reward_chosen"] > after["reward_rejected"]
    with pytest.raises(AssertionError, match="a trained model"):
        worker.compute_ref_log_probs(reference_rows)
