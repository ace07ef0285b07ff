"""Supervised fine-tuning worker. The loss is the mean negative log-prob of the trained tokens of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.algorithms.sampling import PendingCompletion, decode
from alphaapollo.data.batch import RankBatch
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.sharding import reshard
from alphaapollo.types import Completion, Sampling, SamplingRequest
from alphaapollo.workers.finetuning_worker import FinetuningWorker


class SftWorker(FinetuningWorker[RankBatch]):
    """One rank of SFT. The action mask of a batch marks the trained tokens."""

    def count(self, batch: RankBatch) -> dict[str, Tensor]:
        return {"tokens": torch.tensor(int(batch.rows.action_mask.sum()))}

    def compute_loss(
        self, batch: RankBatch, positions: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        micro = self.builder.build(batch.rows, positions)
        total = -(self.model(micro, 1.0).logprobs * micro.mask).sum()
        return total / counts["tokens"], {"loss": total}

    @torch.no_grad()
    def generate(self, requests: Sequence[SamplingRequest], version: int) -> list[Completion]:
        """Sample completions for this rank's requests with the current weights, all at once (a collective).

        Ranks without pending requests still take part in the forward passes of the other ranks.
        """
        assert isinstance(self.model, PolicyModel)
        pending = [PendingCompletion(request.token_ids, request.sampling) for request in requests]
        dummy = PendingCompletion([0], Sampling(max_tokens=1))
        with self.model.generation_mode():
            decode(self.model.next_logits, pending or [dummy], self.device, is_true_on_all_ranks)
        reshard(self.model)
        self.free_cache()
        return [completion.to_completion(version) for completion in pending]


def is_true_on_all_ranks(value: bool) -> bool:
    """Return whether `value` is true on all ranks (a collective)."""
    minimum = torch.tensor(int(value))
    dist.all_reduce(minimum, dist.ReduceOp.MIN)
    return bool(minimum)
