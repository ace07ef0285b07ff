"""How the examples of an optimiser step become a batch for each group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaapollo.data.batch import RankBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.types import Row


@dataclass(frozen=True)
class Layout:
    """Of a run; the same for every step."""

    groups: int  # of ranks that share rows: each gets a batch of its own
    max_tokens: int  # of a micro-batch of a group
    padded: bool  # micro-batches are padded to their longest row


def deal_rows(rows: Sequence[Row], layout: Layout) -> list[RankBatch]:
    """All rows as one mini-batch, dealt to the groups; each row is an example."""
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
