"""Distribute preference examples to ranks. Both answers of a pair are adjacent and share the prompt.

examples -> rows -> build_train_batch (pairs are not split) -> one PreferenceBatch per rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from alphaapollo.data.batch import RankBatch, TrainBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.preference_examples import PreferenceExample
from alphaapollo.data.shared_prompts import MIN_SHARING_RATIO, find_shared_prefixes
from alphaapollo.types import Row


@dataclass(frozen=True)
class PreferenceBatch(RankBatch):
    """Preference rows of one optimizer step on one rank. Rows of a pair are adjacent, the chosen answer first."""

    good: np.ndarray  # bool [R]: the answer is chosen, or labelled desirable
    margins: np.ndarray  # float64 [R], equal for both rows of a pair
    sources: np.ndarray  # int64 [R], indices into source_names
    source_names: list[str]  # data sources of all ranks
    ref_logps: np.ndarray | None = None  # float64 [R] reference log-probs, if precomputed
    unrelated: RankBatch | None = None  # one row per single answer, for KTO's KL estimate
    unrelated_ref_logps: np.ndarray | None = None  # float64 [unrelated rows] reference log-probs, if precomputed


def distribute_preference_examples(
    examples: Sequence[PreferenceExample], num_ranks: int, max_tokens: int, padded: bool, share_prompts: bool
) -> list[PreferenceBatch]:
    """Build one mini-batch from all examples and split it over the ranks. Returns one batch per rank.

    Args:
        max_tokens: maximum tokens of one micro-batch on one rank.
        padded: rows are padded to the longest row of the micro-batch, and padding counts.
        share_prompts: compute shared prompts once if this saves enough tokens (MIN_SHARING_RATIO).
    """
    rows = [row for example in examples for row in example.rows]
    owners = [index for index, example in enumerate(examples) for _ in example.rows]
    layout = _distribute_rows(rows, owners, num_ranks, max_tokens, padded, share_prompts)
    good = np.array([good for example in examples for good in example.good])
    margins = np.array([examples[owner].margin for owner in owners])
    names = sorted({example.data_source for example in examples})
    sources = np.array([names.index(examples[owner].data_source) for owner in owners])
    has_ref_logps = all(example.ref_logps is not None for example in examples)
    ref = np.array([value for example in examples for value in (example.ref_logps or [])[: len(example.rows)]])
    unrelated = list(_distribute_unrelated(examples, num_ranks, max_tokens, padded, has_ref_logps))
    return [
        PreferenceBatch(
            rows=rank.rows,
            mini_batches=rank.mini_batches,
            good=good[order],
            margins=margins[order],
            sources=sources[order],
            source_names=names,
            ref_logps=ref[order] if has_ref_logps else None,
            unrelated=unrelated_rank,
            unrelated_ref_logps=unrelated_ref,
        )
        for rank, order, (unrelated_rank, unrelated_ref) in zip(
            layout.rank_batches, layout.row_order, unrelated, strict=True
        )
    ]


def distribute_reference_rows(
    examples: Sequence[PreferenceExample], num_ranks: int, max_tokens: int, padded: bool, share_prompts: bool
) -> TrainBatch:
    """Distribute all rows that need reference log-probs, in the order of the examples."""
    rows = [row for example in examples for row in example.scored]
    owners = [index for index, example in enumerate(examples) for _ in example.scored]
    return _distribute_rows(rows, owners, num_ranks, max_tokens, padded, share_prompts)


def collect_row_values(layout: TrainBatch, columns: Sequence[np.ndarray]) -> np.ndarray:
    """Collect one column of scores per rank ([R] each) in the order of the rows. Returns float64 [rows]."""
    values = np.empty(layout.num_rows)
    for order, column in zip(layout.row_order, columns, strict=True):
        values[order] = column
    return values


def _distribute_rows(
    rows: Sequence[Row], owners: Sequence[int], num_ranks: int, max_tokens: int, padded: bool, share_prompts: bool
) -> TrainBatch:
    return build_train_batch(
        rows,
        owners,
        num_ranks,
        mini_batch_size=len(rows),
        max_tokens=max_tokens,
        padded=padded,
        seed=0,
        shuffle=False,
        needs_full_trajectories=True,
        prefixes=find_shared_prefixes(rows, owners) if share_prompts else None,
        min_sharing_ratio=MIN_SHARING_RATIO,
    )


def _distribute_unrelated(
    examples: Sequence[PreferenceExample], num_ranks: int, max_tokens: int, padded: bool, has_ref_logps: bool
) -> Iterator[tuple[RankBatch | None, np.ndarray | None]]:
    rows = [example.unrelated for example in examples if example.unrelated is not None]
    if not rows:
        yield from [(None, None)] * num_ranks
        return
    assert len(rows) == len(examples), "single answers and pairs cannot be mixed"
    ref = np.array([example.ref_logps[-1] for example in examples if example.ref_logps is not None])
    layout = _distribute_rows(rows, range(len(rows)), num_ranks, max_tokens, padded, False)
    for rank, order in zip(layout.rank_batches, layout.row_order, strict=True):
        yield rank, ref[order] if has_ref_logps else None
