"""Distribute the examples of an optimizer step to batches, one per group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaapollo.data.batch import RankBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.types import Row


@dataclass(frozen=True)
class Layout:
    """Batch layout of a run, the same for all steps."""

    groups: int  # groups of ranks that share rows; each gets one batch
    max_tokens: int  # per micro-batch of a group
    padded: bool  # whether micro-batches are padded to their longest row


def distribute_rows(rows: Sequence[Row], layout: Layout) -> list[RankBatch]:
    """Distribute rows to the groups as one mini-batch; each row is an example."""
    return build_train_batch(
        rows,
        range(len(rows)),
        num_ranks=layout.groups,
        mini_batch_size=len(rows),
        max_tokens=layout.max_tokens,
        padded=layout.padded,
        seed=0,
        shuffle=False,
    ).rank_batches
