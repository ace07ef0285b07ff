"""Critic worker: one training rank of the critic.

    load_batch -> compute_values -> update(columns) -> offload

Methods that compute are collectives. They reload offloaded tensors; `offload` ends the critic's phase on the GPU.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from alphaapollo.algorithms.aggregation import aggregate
from alphaapollo.algorithms.masked import masked
from alphaapollo.algorithms.value_loss import value_loss
from alphaapollo.config.resolve import chosen_attention
from alphaapollo.config.schema import Critic, Model
from alphaapollo.data.batch import Columns, RankBatch
from alphaapollo.models.critic import ValueModel
from alphaapollo.models.lora import load_trainable_lm
from alphaapollo.models.sharding import shard
from alphaapollo.models.training.train_state import OptimizerSettings, OptimizerStep, TrainState
from alphaapollo.workers.columns import compute_column
from alphaapollo.workers.metric_sums import MetricSums, optimizer_step_metrics
from alphaapollo.workers.model_worker import TrainingWorker
from alphaapollo.workers.process_group import RankPlacement
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck


class CriticWorker(TrainingWorker):
    """One rank of the critic.

    Args:
        model: with the path of the critic's model.
        optimizer_steps: of the whole run, for the learning rate schedule.
        seed: of the new value head, and of new adapters (LoRA).
        saves_in_background: see TrainingWorker.
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
        super().__init__(model, placement, fsdp.fsdp_size, saves_in_background)
        self.critic = critic
        loaded = load_trainable_lm(model, chosen_attention(model), self.dtype, dist.get_rank() == 0, seed)
        self.model = shard(ValueModel(loaded, seed), self.groups.mesh, self.dtype, fsdp.offload_policy)
        self.sharing = SharedPromptCheck(self.model, self.model, self.builder, self.dtype)
        context = self.error_context("critic", "critic.optim", "actor_rollout_ref.model")
        settings = OptimizerSettings(critic.optim, critic.grad_clip, optimizer_steps)
        self.state = TrainState(self.model, settings, fsdp, context)
        self.batch: RankBatch | None = None
        self.offload()

    def load_batch(self, batch: RankBatch) -> None:
        """Set the rows of this iteration."""
        self.batch = batch

    def compute_values(self) -> np.ndarray:
        """Compute the value before each response token. float32 [sum responses]

        Raises ValueError if the first batch shares prompts and the model does not support that.
        """
        self.state.reload()
        self.sharing.check_batch(self._batch)
        return compute_column(self.model, self.model, self._batch.rows, self._batch.mini_batches, self.builder)

    def update(self, columns: Columns[np.ndarray], skip_bad: bool = False) -> dict[str, float]:
        """Make the optimizer steps of one iteration. Returns metrics over all ranks.

        The loss is the mean over the action tokens of a mini-batch, weighted by `columns.value_weights`.
        """
        sums = MetricSums(self.groups.data)
        self.state.reload()
        steps: list[OptimizerStep] = []
        for _ in range(self.critic.ppo_epochs):
            for mini_batch in self._batch.mini_batches:
                for positions in self.state.accumulate(mini_batch.micro_batches):
                    self._accumulate(positions, columns, sums)
                steps.append(self.state.step(skip_bad))
        metrics = _normalize(sums.reduce(self.device), len(steps)) | optimizer_step_metrics(
            steps, self.critic.grad_clip
        )
        return {f"critic/{name}": value for name, value in (metrics | self.sharing.metrics()).items()}

    @property
    def _batch(self) -> RankBatch:
        assert self.batch is not None, "load_batch comes first"
        return self.batch

    def _accumulate(self, positions: list[int], columns: Columns[np.ndarray], sums: MetricSums) -> None:
        """Run forward and backward of one micro-batch."""
        needed = Columns(returns=columns.returns, values=columns.values, value_weights=columns.value_weights)
        micro = self.builder.build(self._batch.rows, positions, needed)
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


def _normalize(sums: dict[str, float], num_steps: int) -> dict[str, float]:
    """Turn sums over everything into means: the loss per optimizer step, the others per token."""
    tokens = max(1.0, sums["tokens"])
    variance = sums["returns_square"] / tokens - (sums["returns"] / tokens) ** 2
    return {
        "loss": sums["loss"] / num_steps,
        "clip_fraction": sums["clip_fraction"] / tokens,
        "value_mean": sums["values"] / tokens,
        "value_std": max(0.0, sums["values_square"] / tokens - (sums["values"] / tokens) ** 2) ** 0.5,
        "return_mean": sums["returns"] / tokens,
        "return_std": max(0.0, variance) ** 0.5,
        "explained_variance": 1 - sums["errors_square"] / tokens / max(variance, 1e-12),
    }
