"""Result of an iteration's update."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from alphaapollo.runs.rollout_log import TrainedRow
from alphaapollo.session.progress import Feedback
from alphaapollo.trainer.step.credit import AssignedCredit
from alphaapollo.trainer.step.training_batch import TrainingBatch


@dataclass(frozen=True)
class UpdateResult:
    """Result of one iteration's optimizer steps."""

    metrics: dict[str, float]
    feedback: Feedback  # for the next iteration
    trained_tokens: int = 0  # tokens of all sequences trained on, prompts included
    batch: TrainingBatch | None = None  # None: there were no groups
    credit: AssignedCredit | None = None  # None: there were no groups
    is_trained: np.ndarray | None = None  # bool [B] rows that the policy was trained on; None: it was not trained
    old_logprobs: list[np.ndarray] = field(default_factory=list)  # per rank, if the update returned them

    def list_trained_rows(self) -> list[TrainedRow]:
        """Return the log-probs before the update and the advantages of the B rows of the batch.

        If the update computed the log-probs, it did so only for the rows that it trained on.
        """
        batch, credit = self.batch, self.credit
        if batch is None or credit is None:
            return []
        earlier = [rank.old_logprobs for rank in credit.columns if rank.old_logprobs is not None]  # before the update
        has_logprobs = np.ones(len(batch.rows), dtype=bool) if earlier or self.is_trained is None else self.is_trained
        old = earlier or self.old_logprobs
        logprobs = batch.layout.join_columns(old).astype(np.float32, copy=False) if old else None
        advantages = credit.advantages.astype(np.float32, copy=False)
        spans = zip(has_logprobs.tolist(), pairwise(batch.layout.response_offsets.tolist()), strict=True)
        rows = []
        for trajectory in batch.trajectories:
            for number in range(len(trajectory.rows)):
                is_known, (start, end) = next(spans)
                part = logprobs[start:end] if logprobs is not None and is_known else None
                rows.append(TrainedRow(trajectory.prompt_id, trajectory.sample, number, part, advantages[start:end]))
        return rows
