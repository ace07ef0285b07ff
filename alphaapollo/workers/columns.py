"""Columns: one number per response token of a batch, computed by workers over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from alphaapollo.data.batch import MiniBatch, Rows
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.models.sharding import FsdpRoot, reshard


@torch.no_grad()
def compute_token_column(
    root: FsdpRoot,
    compute: Callable[[MicroBatch], Tensor],
    rows: Rows,
    mini_batches: Iterable[MiniBatch],
    builder: MicroBatchBuilder,
) -> np.ndarray:
    """Compute a column with forward passes over `mini_batches`. float32 [sum responses]

    `compute` returns one number per response token of a micro-batch, [n]. Rows that are in no mini-batch are zero.
    `root` is resharded afterwards.
    """
    column = TokenColumnBuilder(rows)
    for mini_batch in mini_batches:
        for positions in mini_batch.micro_batches:
            micro = builder.build(rows, positions)
            column.add(positions, micro.drop_dummy_row(compute(micro)))
    reshard(root)
    return column.fetch()


class TokenColumnBuilder:
    """Builder of a column [sum responses] of `rows` from micro-batches. Values stay on the device until `fetch`."""

    def __init__(self, rows: Rows):
        self.rows = rows
        self.positions: list[int] = []
        self.parts: list[Tensor] = []

    def add(self, positions: list[int], values: Tensor) -> None:
        """Add the values [n] of all response tokens of the rows at `positions`."""
        self.positions += positions
        self.parts.append(values)

    def fetch(self, column: np.ndarray | None = None) -> np.ndarray:
        """Return `column` (zeros if None) with the added values. float32, or float64 if any input is [sum responses]"""
        offsets, done = self.rows.response_offsets, 0
        values = np.zeros(0, dtype=np.float32)
        if self.parts:
            computed = torch.cat(self.parts)
            values = computed.to(torch.promote_types(computed.dtype, torch.float32)).cpu().numpy()
        column = np.zeros(offsets[-1], values.dtype) if column is None else column
        column = column.astype(np.promote_types(column.dtype, values.dtype), copy=False)
        for position in self.positions:
            start, end = offsets[position], offsets[position + 1]
            column[start:end] = values[done : done + end - start]
            done += end - start
        return column
