"""Supervised training on one rank: the next-token loss of the trained tokens, one optimiser step at a time."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import LoraForm, Model, SftConfig
from alphaapollo.data.batch import RankBatch
from alphaapollo.models.checkpoint_writer import CheckpointWriter
from alphaapollo.models.export import export
from alphaapollo.models.lora import load_trained
from alphaapollo.models.micro_batch import build_micro_batch
from alphaapollo.models.policy import PolicyModel, check_logprobs, doubts
from alphaapollo.models.sharding import reshard, shard
from alphaapollo.models.train_state import Trained, TrainState
from alphaapollo.models.trunk import decoder_layers
from alphaapollo.workers.base import RankPlacement, Sums, inexact, join, leave, torch_dtype
from alphaapollo.workers.expert_load import ExpertLoad


class SftWorker:
    """One rank. Methods that compute are collectives: every rank calls them, in the same order.

    Args:
        model: resolved.
        optimiser_steps: optimiser steps of the whole run, for the learning rate's schedule.
    """

    def __init__(self, config: SftConfig, model: Model, placement: RankPlacement, optimiser_steps: int):
        self.config, self.placement = model, placement
        fsdp = config.fsdp_config
        self.groups = join(placement, fsdp.fsdp_size)
        self.device = torch.device(placement.device)
        self.dtype = torch_dtype(model)
        self.padded = model.attention == "padded"
        loaded = load_trained(
            model, chosen_attention(model), self.dtype, materialise=placement.rank == 0, seed=config.trainer.seed
        )
        self.model = PolicyModel(loaded)
        mesh, methods = self.groups.shards, PolicyModel.forward_methods
        shard(self.model, decoder_layers(loaded), mesh, self.dtype, fsdp.offload_policy, methods)
        self.doubts = doubts(check_logprobs(self.model, self.padded, self.dtype, self.device, self.groups.sequence))
        reshard(self.model)
        who = Trained("model", "optim", inexact(self.dtype, "model"), "damaged examples in data.train_files")
        self.state = TrainState(self.model, config.optim, config.grad_clip, optimiser_steps, fsdp, who)
        self.writer = CheckpointWriter(behind=False)

    def step(self, batch: RankBatch, skip_bad: bool = False) -> dict[str, float]:
        """One optimiser step on the mean loss over the trained tokens of all ranks. skip_bad: leave it out where its
        gradient is not finite, which else is a FloatingPointError."""
        (mini_batch,) = batch.mini_batches
        num_tokens = self._tokens(batch).over_ranks(self.device)["tokens"]
        sums, load = Sums(self.groups.data), self._expert_load()
        if load:
            load.begin_step(batch.rows, mini_batch.positions)
        for positions in self.state.accumulate(mini_batch.micro_batches):
            loss = self._loss(batch, positions) / num_tokens
            sums.add({"loss": loss})
            if load:
                loss = loss + load.note()
            (loss * self.placement.world_size).backward()  # FSDP averages over the ranks
        figures = self.state.step(skip_bad)
        self.state.rest()
        mean = sums.over_ranks(self.device)["loss"]
        experts = {f"train/{name}": value for name, value in load.figures().items()} if load else {}
        return experts | {
            "train/loss": mean,
            "train/perplexity": math.exp(min(mean, 50.0)),
            "train/grad_norm": figures.grad_norm,
            "train/lr": figures.lr,
            "train/tokens": num_tokens,
            "train/steps_skipped": float(figures.skipped),
        }

    @torch.no_grad()
    def evaluate(self, batch: RankBatch) -> dict[str, float]:
        """The mean loss over the trained tokens of all ranks."""
        sums = self._tokens(batch)
        for mini_batch in batch.mini_batches:
            for positions in mini_batch.micro_batches:
                sums.add({"loss": self._loss(batch, positions)})
        reshard(self.model)
        totals = sums.over_ranks(self.device)
        return {"val/loss": totals["loss"] / totals["tokens"]}

    def _expert_load(self) -> ExpertLoad | None:
        if self.model.routers is None:
            return None
        return ExpertLoad(self.model.routers, self.config.router_aux_loss_coef, self.device, self.groups.data)

    def _tokens(self, batch: RankBatch) -> Sums:
        sums = Sums(self.groups.data)
        sums.add({"tokens": torch.tensor(int(batch.rows.action_mask.sum()))})
        return sums

    def _loss(self, batch: RankBatch, positions: list[int]) -> Tensor:
        """Sum over the trained tokens of a micro-batch."""
        micro = build_micro_batch(batch.rows, positions, self.padded, self.device, sequence=self.groups.sequence)
        return -(self.model(micro, 1.0).logprobs * micro.mask).sum()

    def save(self, folder: str) -> None:
        """Everything that a resumed run needs. Raises OSError that names the folder."""
        self.writer.start([self.state.snapshot(folder)])

    def load(self, folder: str) -> None:
        """Go on from a checkpoint, written by any number of ranks."""
        self.state.load(folder)
        self.state.rest()

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        dist.barrier()

    def export(self, folder: str, form: LoraForm = "merged") -> None:
        """Write a Hugging Face folder in the dtype of the arithmetic; see models.export. FloatingPointError: ruined
        weights."""
        self.state.check_finite()
        export(folder, self.model.model, self.config, self.dtype, form)

    def close(self) -> None:
        leave()
