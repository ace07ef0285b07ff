"""Compute one number per response token of a batch, e.g. log-probs, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from alphaapollo.data.batch import MiniBatch, Rows
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.models.sharding import FsdpRoot, reshard

TokenParts = list[tuple[list[int], Tensor]]  # for each micro-batch: indices of its rows, a number per response token


@torch.no_grad()
def compute_token_outputs(
    model: FsdpRoot,
    compute_outputs: Callable[[MicroBatch], Tensor],
    rows: Rows,
    mini_batches: Iterable[MiniBatch],
    builder: MicroBatchBuilder,
) -> np.ndarray:
    """Compute one number per response token of the rows in `mini_batches`, and 0 for tokens of other rows.

    Returns float32 [response tokens of all rows], and reshards the model afterwards.

    Args:
        compute_outputs: forward pass that returns one number per response token of a micro-batch.
    """
    parts: TokenParts = []
    for mini_batch in mini_batches:
        for row_indices in mini_batch.micro_batches:
            micro = builder.build(rows, row_indices)
            parts.append((row_indices, micro.drop_dummy_row(compute_outputs(micro))))
    reshard(model)
    return merge_token_values(rows, parts)


def merge_token_values(rows: Rows, parts: TokenParts, initial_values: np.ndarray | None = None) -> np.ndarray:
    """Merge numbers that were computed in micro-batches into one array [response tokens of `rows`].

    Tokens in no micro-batch keep their number in `initial_values` (None: 0). float32, or float64 if an input is.
    """
    offsets, done = rows.response_offsets, 0
    values = np.zeros(0, dtype=np.float32)
    if parts:
        computed = torch.cat([part for _, part in parts])
        values = computed.to(torch.promote_types(computed.dtype, torch.float32)).cpu().numpy()
    column = np.zeros(offsets[-1], values.dtype) if initial_values is None else initial_values
    column = column.astype(np.promote_types(column.dtype, values.dtype), copy=False)
    for index in (index for row_indices, _ in parts for index in row_indices):
        start, end = offsets[index], offsets[index + 1]
        column[start:end] = values[done : done + end - start]
        done += end - start
    return column
