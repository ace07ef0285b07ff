"""How the examples of an optimiser step become a batch for each group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaapollo.data.batch import TrainBatch
from alphaapollo.data.packing import build_train_batch
from alphaapollo.data.shared_prompts import Prefixes
from alphaapollo.types import Row


@dataclass(frozen=True)
class Layout:
    """Of a run; the same for every step."""

    groups: int  # of ranks that share rows: each gets a batch of its own
    max_tokens: int  # of a micro-batch of a group
    padded: bool  # micro-batches are padded to their longest row


def rank_batches(
    rows: Sequence[Row], layout: Layout, example_of: Sequence[int] | None = None, prefixes: Prefixes | None = None
) -> TrainBatch:
    """All rows as one mini-batch, dealt to the groups.

    Args:
        example_of: the example of each row, 0 .. N-1, where one has several: its rows share a micro-batch. None: each
            row is one.
        prefixes: of the rows, where what they share is to be computed once.
    """
    examples = range(len(rows)) if example_of is None else example_of
    return build_train_batch(
        rows,
        examples,
        num_ranks=layout.groups,
        mini_batch_size=len(rows),
        max_tokens=layout.max_tokens,
        padded=layout.padded,
        seed=0,
        shuffle=False,
        whole_trajectories=example_of is not None,
        prefixes=prefixes,
    )
