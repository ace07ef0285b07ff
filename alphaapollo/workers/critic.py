"""Workers of models that compute numbers instead of log-probs: the critic, and a frozen reward model.

    load_batch -> compute_values -> update(columns) -> offload

Methods that compute are collectives, and reload offloaded tensors. `offload` frees the GPU for the next worker.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from alphaapollo.algorithms.aggregation import aggregate_token_losses
from alphaapollo.algorithms.statistics import apply_mask
from alphaapollo.algorithms.value_loss import value_loss
from alphaapollo.batching.batch import Columns, RankBatch
from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import Critic, FrozenFsdp, Model
from alphaapollo.models.load import load_reward_model
from alphaapollo.models.lora import load_trainable_lm
from alphaapollo.models.policy import ScoreModel, ValueModel
from alphaapollo.models.sharding import reshard, shard_model
from alphaapollo.models.train_state import TrainState, make_parameter_offloader
from alphaapollo.workers.model_worker import (
    MetricSums,
    ModelWorker,
    TrainingWorker,
    compute_optimizer_metrics,
    compute_token_outputs,
)
from alphaapollo.workers.process_group import RankPlacement
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck


class CriticWorker(TrainingWorker):
    """Worker that trains one rank of the critic.

    Args:
        model: model section with the path of the critic's model.
        optimizer_steps: number of optimizer steps of the run, for the learning rate schedule.
        seed: random seed of the new value head and of new adapters (LoRA).
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
        super().__init__(model, placement, fsdp, saves_in_background)
        self.critic = critic

        def load(dtype: torch.dtype | None) -> ValueModel:
            return ValueModel(load_trainable_lm(model, get_attention_kernel(model), dtype, seed), seed)

        self.model = shard_model(load(self.dtype), lambda: load(None), self.mesh, self.dtype, fsdp.offload_policy)
        self.shared_prompts = SharedPromptCheck(self.model, self.model, self.builder, self.dtype)
        self.state = TrainState(self.model, critic, optimizer_steps, "critic", "critic.optim")
        self.offload()

    def compute_values(self) -> np.ndarray:
        """Compute the critic's value before each response token. float32 [response tokens]"""
        self.state.reload()
        self.shared_prompts.begin_update(self.batch)
        return compute_token_outputs(self.model, self.model, self.batch.rows, self.batch.mini_batches, self.builder)

    def update(self, columns: Columns[np.ndarray], skip_bad_step: bool = False) -> dict[str, float]:
        """Train on the loaded batch, with the mean loss of sampled tokens, and return metrics over all ranks."""
        sums = MetricSums(self.data_group)
        self.state.reload()
        steps = [
            self.run_step(self.batch.rows, mini_batch, partial(self._compute_loss, columns, sums), skip_bad_step)
            for _ in range(self.critic.ppo_epochs)
            for mini_batch in self.batch.mini_batches
        ]
        metrics = _normalize_metrics(sums.reduce(self.device), len(steps))
        metrics |= compute_optimizer_metrics(steps, self.critic.grad_clip)
        return {f"critic/{name}": value for name, value in (metrics | self.shared_prompts.pop_metrics()).items()}

    def _compute_loss(self, columns: Columns[np.ndarray], metric_sums: MetricSums, row_indices: list[int]) -> Tensor:
        """Compute the loss of one micro-batch and add its metrics to `metric_sums`."""
        micro = self.builder.build(self.batch.rows, row_indices, columns)
        inputs = micro.columns
        assert inputs.returns is not None and inputs.values is not None and inputs.value_weights is not None
        values = micro.to_matrix(self.model(micro))
        returns, mask = micro.to_matrix(inputs.returns), micro.to_matrix(micro.mask)
        losses, clipped = value_loss(values, micro.to_matrix(inputs.values), returns, mask, self.critic.cliprange_value)
        loss = aggregate_token_losses(losses, mask, inputs.value_weights)
        metric_sums.add(
            {
                "loss": loss,
                "clip_fraction": clipped.sum(),
                "values": apply_mask(values, mask).sum(),
                "values_square": apply_mask(values, mask).square().sum(),
                "returns": apply_mask(returns, mask).sum(),
                "returns_square": apply_mask(returns, mask).square().sum(),
                "errors_square": apply_mask(values - returns, mask).square().sum(),
                "tokens": mask.sum(),
            }
        )
        return loss


def _normalize_metrics(sums: dict[str, float], num_steps: int) -> dict[str, float]:
    """Convert sums over all ranks to means: the loss per optimizer step, other metrics per sampled token."""
    tokens = max(1.0, sums["tokens"])
    variance = sums["returns_square"] / tokens - (sums["returns"] / tokens) ** 2
    return {
        "vf_loss": sums["loss"] / num_steps,
        "vf_clipfrac": sums["clip_fraction"] / tokens,
        "values/mean": sums["values"] / tokens,
        "values/std": max(0.0, sums["values_square"] / tokens - (sums["values"] / tokens) ** 2) ** 0.5,
        "returns/mean": sums["returns"] / tokens,
        "returns/std": max(0.0, variance) ** 0.5,
        "vf_explained_var": 1 - sums["errors_square"] / tokens / max(variance, 1e-12),
    }


class RewardModelWorker(ModelWorker):
    """Worker that computes scores with one rank of a frozen reward model."""

    def __init__(self, model: Model, fsdp: FrozenFsdp, placement: RankPlacement):
        super().__init__(model, placement)
        attention = get_attention_kernel(model)

        def load(dtype: torch.dtype | None) -> ScoreModel:
            return ScoreModel(load_reward_model(model, attention, dtype))

        root = load(self.dtype).requires_grad_(False)  # on the meta device
        self.model = shard_model(
            root, load_weights=lambda: load(None), mesh=self.mesh, dtype=self.dtype, offload_policy=fsdp.offload_policy
        )
        self.offloader = make_parameter_offloader(self.model, fsdp.param_offload)
        self.offload()

    def compute_scores(self, batch: RankBatch) -> np.ndarray:
        """Compute the score of each of R token sequences, whose response must be the last token. float32 [R]"""
        self.offloader.reload()
        return compute_token_outputs(self.model, self.model, batch.rows, batch.mini_batches, self.builder)

    def offload(self) -> None:
        """Free GPU memory for other workers: reshard the model and offload the configured tensors."""
        reshard(self.model)
        self.offloader.offload()
        torch.cuda.empty_cache()
