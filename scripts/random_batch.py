"""Random rows with random advantages, for benchmarks and checks of an update."""

from __future__ import annotations

import numpy as np

from alphaapollo.batching.batch import Columns, RankBatch
from alphaapollo.batching.packing import build_batch_layout
from alphaapollo.types import Row

PROMPT = 16  # tokens; half of a row shorter than twice that


def random_batch(
    lengths: list[int], vocabulary: int, max_tokens: int, padded: bool, num_ranks: int = 1, rank: int = 0
) -> tuple[RankBatch, Columns]:
    """One rank's part of an optimizer step on rows of these lengths, in micro-batches of at most `max_tokens`."""
    rng = np.random.default_rng(0)
    rows = []
    for length in lengths:
        prompt = min(PROMPT, length // 2)
        mask = [0] * prompt + [1] * (length - prompt)
        rows.append(Row(rng.integers(0, vocabulary, length).tolist(), mask, [-5.0 * one for one in mask], [length - 1]))
    count = len(rows)
    layout = build_batch_layout(rows, range(count), num_ranks, count, max_tokens, padded)
    batch = layout.rank_batches[rank]
    own, total = len(batch.rows.lengths), int(batch.rows.response_offsets[-1])
    return batch, Columns(
        advantages=rng.normal(size=total).astype(np.float32),
        loss_weights=np.full(own, 1 / total, dtype=np.float32),
        sequence_weights=np.full(own, 1 / count, dtype=np.float32),
        trajectory_ids=np.arange(own),
    )
