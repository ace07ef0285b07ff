"""Answers to compare: pairs of answers, or for KTO single ones."""

from __future__ import annotations

import numpy as np

from alphaapollo.algorithms.preference_losses import get_preference_loss
from alphaapollo.batching.batch import RankBatch
from alphaapollo.batching.packing import (
    PreferenceBatch,
    collect_row_values,
    distribute_preference_examples,
    distribute_rows_for_reference,
)
from alphaapollo.data.preference_examples import PreferenceExample, make_unrelated_answers
from alphaapollo.finetuning.dpo import assign_reference_logps
from alphaapollo.types import Row
from alphaapollo.workers.preference import PreferenceWorker
from tests.unit.tiny import VOCABULARY
from tests.unit.workers.training import Case, read_at_the_end


def make_pairs(count: int = 5) -> list[PreferenceExample]:
    """Pairs of answers of 2 to 8 tokens to prompts of 2 to 6 tokens, some with untrained tokens."""
    generator, pairs = np.random.default_rng(0), []
    for index in range(count):
        prompt = generator.integers(2, VOCABULARY, generator.integers(2, 7)).tolist()
        answers = [generator.integers(2, VOCABULARY, generator.integers(2, 9)).tolist() for _ in range(2)]
        pairs.append(
            PreferenceExample([make_row(prompt, answer) for answer in answers], [True, False], "ab"[index % 2])
        )
    return pairs


def make_row(prompt: list[int], answer: list[int]) -> Row:
    mask = [0] * len(prompt) + [1] * len(answer)
    if len(answer) > 4:
        mask[len(prompt) + 2] = 0
    return Row([*prompt, *answer], mask, [0.0] * len(mask), [len(mask) - 1])


def make_examples(case: Case) -> list[PreferenceExample]:
    """Pairs, for KTO two single answers each, and for a reward model pairs of scored answers, one with a margin."""
    is_pairwise = get_preference_loss(case.settings.get("preference", {}).get("loss", "sigmoid")).is_pairwise
    pairs = make_pairs(max(1 if is_pairwise else 2, case.num_rows // 2))
    if case.role == "reward":
        for pair in pairs:
            pair.rows = [read_at_the_end(row) for row in pair.rows]
        pairs[-1].margin = 0.7
        return pairs
    if is_pairwise:
        return pairs
    rows = [row for pair in pairs for row in pair.rows]
    others = make_unrelated_answers(rows, 0, 100)
    return [
        PreferenceExample([row], [index % 2 == 0], "", unrelated_answer=other)
        for index, (row, other) in enumerate(zip(rows, others, strict=True))
    ]


def distribute(case: Case, examples: list[PreferenceExample], num_ranks: int = 1) -> list[PreferenceBatch]:
    padded = case.attention == "padded"
    return distribute_preference_examples(examples, num_ranks, case.max_tokens, padded, case.shares_prompts)


def assign_reference(worker: PreferenceWorker, case: Case, examples: list[PreferenceExample]) -> RankBatch:
    """Assign the log-probs of the reference to examples. Returns the rows for which they were computed."""
    padded = case.attention == "padded"
    layout = distribute_rows_for_reference(examples, 1, case.max_tokens, padded, case.shares_prompts)
    assign_reference_logps(examples, collect_row_values(layout, [worker.compute_ref_log_probs(layout.rank_batches[0])]))
    return layout.rank_batches[0]
