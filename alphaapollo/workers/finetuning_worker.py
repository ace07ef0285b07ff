"""What the workers of all kinds of fine-tuning have in common: one rank, one optimizer step at a time.

    counts, over all ranks --> each micro-batch: its part of the loss, backward --> the optimizer's step

A kind is a subclass with `counts` and `loss` (sft.py). Methods that compute are collectives: every rank calls them, in
the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import LoraForm, Model, TuningConfig
from alphaapollo.data.batch import Stepped, TunedBatch
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.export.hf_folder import export
from alphaapollo.models.lora import load_trainable_lm
from alphaapollo.models.moe_routing import Routers
from alphaapollo.models.policy import PolicyModel, check_logprobs, self_check_warnings
from alphaapollo.models.sharding import reshard, shard
from alphaapollo.models.training.train_state import Trained, TrainState
from alphaapollo.workers.moe_load_balancing import ExpertLoadBalancer
from alphaapollo.workers.process_group import MetricSums, RankPlacement, inexact, torch_dtype
from alphaapollo.workers.training_worker import TrainingWorker

B = TypeVar("B", bound=TunedBatch)


class FinetuningWorker(TrainingWorker, ABC, Generic[B]):
    """One rank.

    Args:
        model: resolved.
        optimizer_steps: optimizer steps of the whole run, for the learning rate's schedule.
        saves_in_background: checkpoints are copied, and written while the worker goes on.
    """

    model: nn.Module
    routers: Routers | None = None  # of a mixture of experts
    self_check_warnings: list[str]  # what the self-check leaves to be said

    def __init__(
        self,
        config: TuningConfig,
        model: Model,
        placement: RankPlacement,
        optimizer_steps: int,
        saves_in_background: bool = False,
    ):
        super().__init__(placement, config.fsdp_config.fsdp_size, saves_in_background)
        self.config, self.seed, self.fsdp = model, config.trainer.seed, config.fsdp_config
        self.dtype = torch_dtype(model)
        self.padded = model.attention == "padded"
        self.load_model()
        reshard(self.model)
        who = Trained("model", "optim", inexact(self.dtype, "model"), "damaged examples in data.train_files")
        self.state = TrainState(self.model, config.optim, config.grad_clip, optimizer_steps, self.fsdp, who)

    @abstractmethod
    def counts(self, batch: B) -> dict[str, Tensor]:
        """What of this rank's batch the loss is a mean over, or else is to be reported: tokens, pairs."""

    @abstractmethod
    def loss(self, batch: B, positions: list[int], counts: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
        """Of the micro-batch of the rows at `positions`: its part of the batch's loss, and sums to report.

        counts: of the batch, over all ranks.
        """

    def load_model(self) -> None:
        """Load and shard `model` and run its self-check. Sets `routers` and `self_check_warnings`."""
        attention, first = chosen_attention(self.config), self.placement.rank == 0
        loaded = load_trainable_lm(self.config, attention, self.dtype, materialize=first, seed=self.seed)
        model = PolicyModel(loaded)
        mesh, offload = self.groups.shards, self.fsdp.offload_policy
        shard(model, decoder_layers(loaded), mesh, self.dtype, offload, PolicyModel.forward_methods)
        self.model, self.routers = model, model.routers
        self.self_check_warnings = self_check_warnings(
            check_logprobs(model, self.padded, self.dtype, self.device, self.groups.sequence)
        )

    def step(self, batch: B, skip_bad: bool = False) -> Stepped:
        """One optimizer step. skip_bad: leave it out where its gradient is not finite, which else is a
        FloatingPointError."""
        (mini_batch,) = batch.mini_batches
        counts, sums, load = self._counted(batch), MetricSums(self.groups.data), self._expert_load()
        if load:
            load.begin_step(batch.rows, mini_batch.positions)
        for positions in self.state.accumulate(mini_batch.micro_batches):
            loss, reported = self.loss(batch, positions, counts)
            sums.add(reported)
            if load:
                loss = loss + load.note()
            (loss * self.placement.world_size).backward()  # FSDP averages over the ranks
        made = self.state.step(skip_bad)
        self.state.offload()
        figures = {"grad_norm": made.grad_norm, "lr": made.lr, "steps_skipped": float(made.skipped)}
        return Stepped(counts | sums.reduce(self.device), figures | (load.figures() if load else {}))

    @torch.no_grad()
    def evaluate(self, batch: B) -> dict[str, float]:
        """What a step would report: counts and sums over all ranks."""
        counts, sums = self._counted(batch), MetricSums(self.groups.data)
        for mini_batch in batch.mini_batches:
            for positions in mini_batch.micro_batches:
                sums.add(self.loss(batch, positions, counts)[1])
        reshard(self.model)
        return counts | sums.reduce(self.device)

    def _counted(self, batch: B) -> dict[str, float]:
        sums = MetricSums(self.groups.data)
        sums.add(self.counts(batch))
        return sums.reduce(self.device)

    def _expert_load(self) -> ExpertLoadBalancer | None:
        if self.routers is None:
            return None
        return ExpertLoadBalancer(self.routers, self.config.router_aux_loss_coef, self.device, self.groups.data)

    def export(self, folder: str, form: LoraForm = "merged") -> None:
        """Write a Hugging Face folder in the dtype of the arithmetic; see models.export. FloatingPointError: ruined
        weights."""
        assert isinstance(self.model, PolicyModel), "a kind with another model has an export of its own"
        self.state.check_finite()
        export(folder, self.model.model, self.config, self.dtype, form)
