"""Supervised training on one rank: the mean next-token loss of the trained tokens of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from alphaapollo.data.batch import RankBatch
from alphaapollo.models.micro_batch import build_micro_batch
from alphaapollo.workers.tuned import TunedWorker


class SftWorker(TunedWorker[RankBatch]):
    """Of a batch's rows the action mask says which tokens are trained on."""

    def counts(self, batch: RankBatch) -> dict[str, Tensor]:
        return {"tokens": torch.tensor(int(batch.rows.action_mask.sum()))}

    def loss(
        self, batch: RankBatch, positions: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        micro = build_micro_batch(batch.rows, positions, self.padded, self.device, sequence=self.groups.sequence)
        total = -(self.model(micro, 1.0).logprobs * micro.mask).sum()
        return total / counts["tokens"], {"loss": total}
