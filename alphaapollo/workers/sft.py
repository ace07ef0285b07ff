"""Worker of supervised fine-tuning. The loss is the mean negative log-prob of the response tokens on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.algorithms.sampling import PendingCompletion, decode_batch
from alphaapollo.data.batch import RankBatch
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.sharding import reshard
from alphaapollo.types import Completion, Sampling, SamplingRequest
from alphaapollo.workers.finetuning_worker import FinetuningWorker


class SftWorker(FinetuningWorker[RankBatch]):
    """Worker that trains one rank in SFT. The action mask of a batch marks the tokens to train on."""

    def compute_loss_denominators(self, batch: RankBatch) -> dict[str, Tensor]:
        return {"tokens": torch.tensor(int(batch.rows.action_mask.sum()))}

    def compute_loss(
        self, batch: RankBatch, row_indices: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        micro = self.builder.build(batch.rows, row_indices)
        total = -(self.model(micro, 1.0).logprobs * micro.mask).sum()
        return total / counts["tokens"], {"loss": total}

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        """Decoder of the tokens of an answer, to find stop strings."""
        tokenizer = load_tokenizer(self.config.tokenizer_path or self.config.path, self.config.trust_remote_code)
        return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @torch.no_grad()
    def generate(self, requests: Sequence[SamplingRequest], version: int) -> list[Completion]:
        """Sample one completion for each of this rank's requests, all at once, with the current weights.

        A collective: a rank whose completions are finished still takes part in the forward passes of other ranks.
        """
        assert isinstance(self.model, PolicyModel)
        pending = [
            PendingCompletion(one.token_ids, one.sampling, decode=self._decode if one.sampling.stop else None)
            for one in requests
        ]
        dummy = PendingCompletion([0], Sampling(max_tokens=1))
        with self.model.generation_mode():
            decode_batch(self.model.next_logits, pending or [dummy], self.device, is_true_on_all_ranks)
        reshard(self.model)
        torch.cuda.empty_cache()
        return [completion.to_completion(version) for completion in pending]


def is_true_on_all_ranks(value: bool) -> bool:
    """Return whether `value` is true on every rank (a collective)."""
    minimum = torch.tensor(int(value))
    dist.all_reduce(minimum, dist.ReduceOp.MIN)
    return bool(minimum)
