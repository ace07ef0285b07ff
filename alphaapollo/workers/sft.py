"""Supervised training on one rank: the mean next-token loss of the trained tokens of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.algorithms.sampling import PendingCompletion, decode
from alphaapollo.data.batch import RankBatch
from alphaapollo.models.micro_batch import build_micro_batch
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.sharding import reshard
from alphaapollo.types import Asked, Completion, Sampling
from alphaapollo.workers.finetuning_worker import FinetuningWorker
from alphaapollo.workers.process_group import free_cache


class SftWorker(FinetuningWorker[RankBatch]):
    """Of a batch's rows the action mask says which tokens are trained on."""

    def counts(self, batch: RankBatch) -> dict[str, Tensor]:
        return {"tokens": torch.tensor(int(batch.rows.action_mask.sum()))}

    def loss(
        self, batch: RankBatch, positions: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        micro = build_micro_batch(batch.rows, positions, self.padded, self.device, sequence=self.groups.sequence)
        total = -(self.model(micro, 1.0).logprobs * micro.mask).sum()
        return total / counts["tokens"], {"loss": total}

    @torch.no_grad()
    def answer(self, asked: Sequence[Asked], version: int) -> list[Completion]:
        """This rank's answers by the present weights, all sampled at once. A collective: who has none, or is done,
        takes part in the forward passes of the others."""
        assert isinstance(self.model, PolicyModel)
        draws = [PendingCompletion(one.token_ids, one.sampling) for one in asked] or [
            PendingCompletion([0], Sampling(max_tokens=1))
        ]
        with self.model.generation_mode():
            decode(self.model.next_logits, draws, self.device, on_all_ranks)
        reshard(self.model)
        free_cache(self.device)
        return [draw.completion(version) for draw in draws[: len(asked)]]


def on_all_ranks(here: bool) -> bool:
    """A collective."""
    least = torch.tensor(int(here))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(least)
