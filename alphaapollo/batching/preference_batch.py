"""Build the batches of preference and reward-model training. Each answer is a row, i.e. one token sequence.

Both answers of a pair are adjacent rows of the same micro-batch, and may share the computation of their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alphaapollo.batching.batch import BatchLayout, RankBatch
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.batching.shared_prompts import find_shared_prompts
from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.types import Row


@dataclass(frozen=True)
class PreferenceBatch(RankBatch):
    """Answers that one rank trains on in one optimizer step. Of a pair, the chosen answer comes first."""

    is_good: np.ndarray  # bool [R]: the answer is chosen, or labelled desirable
    margins: np.ndarray  # float64 [R], equal for both rows of a pair
    sources: np.ndarray  # int64 [R], indices into source_names
    source_names: list[str]  # data sources of all ranks
    ref_logps: np.ndarray | None  # float64 [R] reference log-probs, if precomputed
    unrelated_answers: RankBatch  # for KTO's KL estimate: prompts of single answers with answers to other prompts
    unrelated_ref_logps: np.ndarray | None  # float64 [unrelated rows] reference log-probs, if precomputed


def distribute_preference_examples(
    examples: Sequence[PreferenceExample], num_ranks: int, max_tokens: int, padded: bool, uses_shared_prompts: bool
) -> list[PreferenceBatch]:
    """Distribute the answers of one optimizer step to the ranks. Returns one batch per rank.

    Args:
        max_tokens: token budget of a micro-batch. padded: padding counts in the budget.
        uses_shared_prompts: compute the prompt of a pair once if this saves enough tokens (MIN_SHARING_RATIO).
    """
    rows = [row for example in examples for row in example.rows]
    example_ids = [index for index, example in enumerate(examples) for _ in example.rows]
    layout = _distribute_rows(rows, example_ids, num_ranks, max_tokens, padded, uses_shared_prompts)
    is_good = np.array([good for example in examples for good in example.is_good])
    margins = np.array([examples[index].margin for index in example_ids])
    names = sorted({example.data_source for example in examples})
    sources = np.array([names.index(examples[index].data_source) for index in example_ids])
    has_ref_logps = all(example.ref_logps is not None for example in examples)
    ref = np.array([value for example in examples for value in (example.ref_logps or [])[: len(example.rows)]])
    unrelated_rows = [example.unrelated_answer for example in examples if example.unrelated_answer is not None]
    assert len(unrelated_rows) in (0, len(examples)), "single answers and pairs cannot be mixed"
    unrelated = _distribute_rows(unrelated_rows, range(len(unrelated_rows)), num_ranks, max_tokens, padded, False)
    unrelated_ref = np.array([example.ref_logps[-1] for example in examples if example.ref_logps is not None])
    return [
        PreferenceBatch(
            rows=rank.rows,
            mini_batches=rank.mini_batches,
            is_good=is_good[order],
            margins=margins[order],
            sources=sources[order],
            source_names=names,
            ref_logps=ref[order] if has_ref_logps else None,
            unrelated_answers=unrelated_rank,
            unrelated_ref_logps=unrelated_ref[unrelated_order] if has_ref_logps else None,
        )
        for rank, order, unrelated_rank, unrelated_order in zip(
            layout.rank_batches, layout.row_order, unrelated.rank_batches, unrelated.row_order, strict=True
        )
    ]


def distribute_rows_for_reference(
    examples: Sequence[PreferenceExample], num_ranks: int, max_tokens: int, padded: bool, uses_shared_prompts: bool
) -> BatchLayout:
    """Distribute the answers whose reference log-probs are needed to the ranks, as one mini-batch."""
    rows = [row for example in examples for row in example.rows_for_reference]
    example_ids = [index for index, example in enumerate(examples) for _ in example.rows_for_reference]
    return _distribute_rows(rows, example_ids, num_ranks, max_tokens, padded, uses_shared_prompts)


def collect_row_values(batch: BatchLayout, rank_values: Sequence[np.ndarray]) -> np.ndarray:
    """Merge the arrays of the ranks, with one value per row of the rank, into one array in the batch's row order."""
    values = np.empty(batch.num_rows)
    for order, own_values in zip(batch.row_order, rank_values, strict=True):
        values[order] = own_values
    return values


def _distribute_rows(
    rows: Sequence[Row],
    example_ids: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    padded: bool,
    uses_shared_prompts: bool,
) -> BatchLayout:
    """Distribute a mini-batch to ranks and micro-batches. example_ids: example of each row; its rows stay together."""
    return build_batch_layout(
        rows,
        example_ids,
        num_ranks,
        mini_batch_size=max(1, len(rows)),
        max_tokens=max_tokens,
        padded=padded,
        needs_full_sequence=True,
        shared_prompts=find_shared_prompts(rows, example_ids) if uses_shared_prompts else None,
    )
