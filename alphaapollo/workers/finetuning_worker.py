"""Base class of the fine-tuning workers, one per training rank.

    count over all ranks, e.g. tokens -> for each micro-batch: its share of the loss, backward -> optimizer step

Each kind of fine-tuning is a subclass with `compute_loss_denominators` and `compute_loss` (e.g. SftWorker).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.algorithms.sampling import PendingCompletion, decode_batch
from alphaapollo.batching.batch import FinetuningStepResult, RankBatch
from alphaapollo.config.schema import Model, TuningConfig
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.models.moe_routing import RouterHooks
from alphaapollo.models.policy import PolicyModel, check_policy, load_policy
from alphaapollo.models.sharding import FsdpRoot, reshard
from alphaapollo.models.train_state import TrainState
from alphaapollo.types import Completion, Sampling, SamplingRequest
from alphaapollo.workers.model_worker import MetricSums, TrainingWorker
from alphaapollo.workers.process_group import RankPlacement

B = TypeVar("B", bound=RankBatch)


class FinetuningWorker(TrainingWorker, ABC, Generic[B]):
    """Worker that trains one rank of a fine-tuning run.

    Args:
        model: model section after `resolve_model`.
        optimizer_steps: number of optimizer steps of the run, for the learning rate schedule.
    """

    tuning: TuningConfig
    model: FsdpRoot
    routers: RouterHooks | None = None  # routers of a mixture of experts; None: a dense model

    def __init__(
        self,
        config: TuningConfig,
        model: Model,
        placement: RankPlacement,
        optimizer_steps: int,
        saves_in_background: bool = False,
    ):
        super().__init__(model, placement, config.fsdp_config, saves_in_background)
        self.tuning = config
        self.load_model()
        reshard(self.model)
        self.state = TrainState(self.model, config, optimizer_steps, "model", "optim")

    @abstractmethod
    def compute_loss_denominators(self, batch: B) -> dict[str, Tensor]:
        """Count what the loss is averaged over on this rank, e.g. `{"tokens": 960}`."""

    @abstractmethod
    def compute_loss(
        self, batch: B, row_indices: list[int], counts: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a micro-batch's loss share and metric sums. `counts`: loss denominators, summed over all ranks."""

    def load_model(self) -> None:
        """Load, shard and check the model. Sets `model`, `hf_model`, `routers` and `logprob_check_warnings`."""
        offload, seed = self.tuning.fsdp_config.offload_policy, self.tuning.trainer.seed
        model = load_policy(self.config, self.mesh, self.dtype, offload, seed)
        self.model, self.hf_model, self.routers = model, model.model, model.routers
        self.logprob_check_warnings = check_policy(model, self.builder, self.dtype)

    def step(self, batch: B, skip_bad_step: bool = False) -> FinetuningStepResult:
        """Run one optimizer step. A non-finite gradient skips it (`skip_bad_step`) or raises FloatingPointError."""
        (mini_batch,) = batch.mini_batches
        counts, sums = self._count_loss_terms_on_all_ranks(batch), MetricSums(self.data_group)
        self.balancer = self.make_expert_load_balancer(self.routers)

        def compute_loss(row_indices: list[int]) -> Tensor:
            loss, reported = self.compute_loss(batch, row_indices, counts)
            sums.add(reported)
            return loss

        step = self.run_step(batch.rows, mini_batch, compute_loss, skip_bad_step)
        self.state.offload()
        metrics = {"grad_norm": step.grad_norm, "lr": step.lr, "steps_skipped": float(step.skipped)}
        metrics |= self.balancer.compute_metrics() if self.balancer else {}
        return FinetuningStepResult(counts | sums.reduce(self.device), metrics)

    @torch.no_grad()
    def evaluate(self, batch: B) -> dict[str, float]:
        """Compute the counts and metric sums of a validation batch over all ranks, without training on it."""
        counts, sums = self._count_loss_terms_on_all_ranks(batch), MetricSums(self.data_group)
        for mini_batch in batch.mini_batches:
            for row_indices in mini_batch.micro_batches:
                _, metric_sums = self.compute_loss(batch, row_indices, counts)
                sums.add(metric_sums)
        reshard(self.model)
        return counts | sums.reduce(self.device)

    def _count_loss_terms_on_all_ranks(self, batch: B) -> dict[str, float]:
        sums = MetricSums(self.data_group)
        sums.add(self.compute_loss_denominators(batch))
        return sums.reduce(self.device)


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
            PendingCompletion(
                request.token_ids, request.sampling, decode=self._decode if request.sampling.stop else None
            )
            for request in requests
        ]
        computed = pending or [PendingCompletion([0], Sampling(max_tokens=1))]  # a dummy, if this rank has no requests
        with self.model.generation_mode():
            decode_batch(self.model.next_logits, computed, self.device, is_true_on_all_ranks)
        reshard(self.model)
        torch.cuda.empty_cache()
        return [completion.to_completion(version) for completion in pending]


def is_true_on_all_ranks(value: bool) -> bool:
    """Return whether `value` is true on every rank (a collective)."""
    minimum = torch.tensor(int(value))
    dist.all_reduce(minimum, dist.ReduceOp.MIN)
    return bool(minimum)
