"""The critic on one training rank.

    load_batch -> compute_values -> update(columns) -> rest

Methods that compute are collectives: every rank calls them, in the same order. They reload what rests; `rest` ends the
critic's phase on the GPU.
"""

from __future__ import annotations

import numpy as np

from alphaapollo.algorithms.aggregation import aggregate
from alphaapollo.algorithms.masked import masked
from alphaapollo.algorithms.value_loss import value_loss
from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import Critic, Model
from alphaapollo.data.batch import Columns, RankBatch
from alphaapollo.models.critic import CriticModel
from alphaapollo.models.decoder import decoder_layers
from alphaapollo.models.lora import load_trainable_lm
from alphaapollo.models.micro_batch import build_micro_batch
from alphaapollo.models.sharding import shard
from alphaapollo.models.training.train_state import OptimizerStep, Trained, TrainState
from alphaapollo.workers.process_group import (
    MetricSums,
    RankPlacement,
    compute_column,
    inexact,
    optimizer_step_metrics,
    torch_dtype,
)
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck
from alphaapollo.workers.training_worker import TrainingWorker


class CriticWorker(TrainingWorker):
    """One rank of the critic.

    Args:
        model: with the path of the critic's trunk.
        optimizer_steps: optimizer steps of the whole run, for the learning rate's schedule.
        seed: of the fresh value head, and of fresh adapters (LoRA).
        saves_in_background: checkpoints are copied, and written while the worker goes on.
    """

    def __init__(
        self,
        model: Model,
        critic: Critic,
        placement: RankPlacement,
        optimizer_steps: int,
        seed: int,
        saves_in_background: bool = False,
    ):
        fsdp = critic.fsdp_config
        super().__init__(placement, fsdp.fsdp_size, saves_in_background)
        self.critic = critic
        self.padded = model.attention == "padded"
        dtype = torch_dtype(model)
        loaded = load_trainable_lm(model, chosen_attention(model), dtype, materialize=placement.rank == 0, seed=seed)
        layers = decoder_layers(loaded)
        self.model = CriticModel(loaded, seed)
        head = self.model.value_head
        shard(self.model, layers, self.groups.shards, dtype, fsdp.offload_policy, exact=[head])
        self.sharing = SharedPromptCheck(
            self.model, loaded, self.model, dtype, self.padded, self.device, self.groups.sequence
        )
        who = Trained("critic", "critic.optim", inexact(dtype, "actor_rollout_ref.model"))
        self.state = TrainState(
            self.model, critic.optim, critic.grad_clip, optimizer_steps, fsdp, who, fsdp.param_offload
        )
        self.batch: RankBatch | None = None
        self.offload()

    def load_batch(self, batch: RankBatch) -> None:
        """The rows of this iteration."""
        self.batch = batch

    def compute_values(self) -> np.ndarray:
        """The value before each response token. float32 [sum responses]

        ValueError: the first batch shares prompts, which this model cannot compute."""
        self.state.reload()
        self.sharing.check_batch(self._batch)
        rows, sequence = self._batch.rows, self.groups.sequence
        return compute_column(
            self.model, self.model, rows, self._batch.mini_batches, self.padded, self.device, sequence
        )

    def update(self, columns: Columns[np.ndarray], skip_bad: bool = False) -> dict[str, float]:
        """The optimizer steps of one iteration, on the mean over a mini-batch's action tokens (where samples are
        filtered, weighted by `columns.value_weights`); figures are over all ranks."""
        sums = MetricSums(self.groups.data)
        self.state.reload()
        steps: list[OptimizerStep] = []
        for _ in range(self.critic.ppo_epochs):
            for mini_batch in self._batch.mini_batches:
                for positions in self.state.accumulate(mini_batch.micro_batches):
                    self._accumulate(positions, columns, sums)
                steps.append(self.state.step(skip_bad))
        figures = self._figures(sums.reduce(self.device), steps, self.critic.grad_clip)
        return figures | {f"critic/{name}": value for name, value in self.sharing.figures().items()}

    @property
    def _batch(self) -> RankBatch:
        assert self.batch is not None, "load_batch comes first"
        return self.batch

    def _accumulate(self, positions: list[int], columns: Columns[np.ndarray], sums: MetricSums) -> None:
        """Forward and backward of one micro-batch."""
        wanted = Columns(returns=columns.returns, values=columns.values, value_weights=columns.value_weights)
        micro = build_micro_batch(self._batch.rows, positions, self.padded, self.device, wanted, self.groups.sequence)
        given = micro.columns
        assert given.returns is not None and given.values is not None and given.value_weights is not None
        values = micro.to_matrix(self.model(micro))
        returns, mask = micro.to_matrix(given.returns), micro.to_matrix(micro.mask)
        losses, clipped = value_loss(values, micro.to_matrix(given.values), returns, mask, self.critic.cliprange_value)
        loss = aggregate(losses, mask, given.value_weights)
        (loss * self.placement.world_size).backward()  # FSDP averages over the ranks
        sums.add(
            {
                "loss": loss,
                "clip_fraction": clipped.sum(),
                "values": masked(values, mask).sum(),
                "values_square": masked(values, mask).square().sum(),
                "returns": masked(returns, mask).sum(),
                "returns_square": masked(returns, mask).square().sum(),
                "errors_square": masked(values - returns, mask).square().sum(),
                "tokens": mask.sum(),
            }
        )

    @staticmethod
    def _figures(sums: dict[str, float], steps: list[OptimizerStep], grad_clip: float) -> dict[str, float]:
        tokens = max(1.0, sums["tokens"])
        variance = sums["returns_square"] / tokens - (sums["returns"] / tokens) ** 2
        return {
            "critic/loss": sums["loss"] / len(steps),
            "critic/clip_fraction": sums["clip_fraction"] / tokens,
            "critic/value_mean": sums["values"] / tokens,
            "critic/value_std": max(0.0, sums["values_square"] / tokens - (sums["values"] / tokens) ** 2) ** 0.5,
            "critic/return_mean": sums["returns"] / tokens,
            "critic/return_std": max(0.0, variance) ** 0.5,
            "critic/explained_variance": 1 - sums["errors_square"] / tokens / max(variance, 1e-12),
            **{f"critic/{name}": value for name, value in optimizer_step_metrics(steps, grad_clip).items()},
        }
