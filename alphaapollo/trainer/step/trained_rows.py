"""Collect what the trainer computed for each token of an iteration, for the rollout log."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from alphaapollo.observability.training_log import TrainedRow
from alphaapollo.trainer.step.learn import UpdateResult


def make_trained_rows(learned: UpdateResult) -> list[TrainedRow]:
    """Return the log-probs before the update and the advantages of the B rows of the batch.

    If the update computed the log-probs, it did so only for the rows that it trained on.
    """
    batch, credit = learned.batch, learned.credit
    assert batch and credit
    known = [rank.old_logprobs for rank in credit.columns if rank.old_logprobs is not None]
    has_logprobs = np.ones(len(batch.rows), dtype=bool) if known or learned.is_trained is None else learned.is_trained
    old = known or learned.old_logprobs
    logprobs = batch.layout.join_columns(old).astype(np.float32, copy=False) if old else None
    columns = [rank.advantages for rank in credit.columns if rank.advantages is not None]
    advantages = batch.layout.join_columns(columns).astype(np.float32, copy=False)
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
