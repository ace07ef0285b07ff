"""Collect what the trainer computed for each token of an iteration, for the rollout log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from alphaapollo.observability.training_log import TrainedRow
from alphaapollo.trainer.step.credit import AssignedCredit
from alphaapollo.trainer.step.training_batch import Batch


def make_trained_rows(
    batch: Batch, credit: AssignedCredit, old_logprobs: Sequence[np.ndarray] | None, is_trained: np.ndarray | None
) -> list[TrainedRow]:
    """Return log-probs before the update and advantages of the B rows of a batch.

    Args:
        old_logprobs: one array per rank; None: not computed.
        is_trained: bool [B]. If the update computed the log-probs, it did so only for these rows.
    """
    join = batch.layout.join_columns
    advantages = join([rank.advantages for rank in credit.columns if rank.advantages is not None]).astype(
        np.float32, copy=False
    )
    logprobs = None if old_logprobs is None else join(list(old_logprobs)).astype(np.float32, copy=False)
    has_logprobs = np.ones(len(batch.rows), dtype=bool)
    if credit.columns[0].old_logprobs is None and is_trained is not None:
        has_logprobs = is_trained
    identities = [
        (trajectory.prompt_id, trajectory.sample, number)
        for trajectory in batch.trajectories
        for number in range(len(trajectory.rows))
    ]
    spans = pairwise(batch.layout.response_offsets)
    return [
        TrainedRow(*identity, logprobs[start:end] if logprobs is not None and computed else None, advantages[start:end])
        for identity, computed, (start, end) in zip(identities, has_logprobs, spans, strict=True)
    ]
