"""A small differentiable table in place of the model, in float64, with the worker's objective.

Token i has log-prob b_i + f_i theta, entropy softplus(g_i theta) and full KL softplus(h_i theta). Ranks are simulated
one after the other and their gradients are added, which equals FSDP's mean of the scaled losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from alphaapollo.algorithms.aggregation import aggregate_token_losses
from alphaapollo.algorithms.policy_losses import PolicyLoss
from alphaapollo.algorithms.value_loss import value_loss
from alphaapollo.batching.batch import concatenate_segments
from alphaapollo.config.schema import Config
from alphaapollo.models.lm_head import TokenStats
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder
from alphaapollo.workers.model_worker import MAX_SUFFIX
from alphaapollo.workers.policy_objective import build_objective_inputs, compute_policy_objective
from alphaapollo.workers.teacher import compute_distillation_loss
from tests.invariance.views import Prepared, View

SIZE = 12  # of theta
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Table:
    base: Tensor  # [T]
    features: Tensor  # [T, 3, SIZE]

    @classmethod
    def draw(cls, generator: np.random.Generator, old: np.ndarray) -> Table:
        """Log-probs different from the old ones, so that clips and gates act."""
        base = old + 0.2 * generator.standard_normal(len(old))
        return cls(torch.from_numpy(base), torch.from_numpy(0.3 * generator.standard_normal((len(old), 3, SIZE))))

    def stats(self, theta: Tensor, tokens: np.ndarray) -> TokenStats:
        """Values of the tokens with these numbers; -1 = token of the environment."""
        numbers = torch.from_numpy(tokens).clamp(min=0)
        logp, entropy, kl = (self.features[numbers] @ theta).unbind(1)
        return TokenStats(self.base[numbers] + logp, softplus(entropy), softplus(kl))


@dataclass(frozen=True)
class Outcome:
    """Results of an update: losses and gradients of policy and critic per optimizer step, and metrics."""

    advantages: np.ndarray  # [T]
    returns: np.ndarray  # [T]
    losses: list[float]
    gradients: list[Tensor]
    value_gradients: list[Tensor]
    metrics: dict[str, float]


@dataclass
class Descent:
    """Gradient descent of policy and critic over the mini-batches of a view."""

    view: View
    table: Table
    config: Config
    loss: PolicyLoss
    metrics: dict[str, float] = field(default_factory=dict)

    def run(self, make: Callable[[], Prepared], num_tokens: int) -> Outcome:
        """`make` prepares the case; a resumed view calls it at every step."""
        prepared, losses, gradients, value_gradients = make(), [], [], []
        theta = torch.zeros(SIZE, dtype=torch.float64)
        for _ in range(self.config.actor_rollout_ref.actor.ppo_epochs):
            for step in range(len(prepared.batch.layout.mini_batch_rows)):
                prepared, theta = (make(), copy.deepcopy(theta)) if self.view.resumed else (prepared, theta)
                leaf = theta.clone().requires_grad_()
                total = self.policy_loss(prepared, step, leaf)
                (gradient,) = torch.autograd.grad(total, leaf, materialize_grads=True)
                losses.append(float(total.detach()))
                gradients.append(gradient)
                of_critic = self.value_loss(prepared, step, leaf)
                value_gradients += torch.autograd.grad(of_critic, leaf, materialize_grads=True)
                theta = theta - LEARNING_RATE * gradient
        columns = [prepared.by_token(name, num_tokens) for name in ("advantages", "returns")]
        return Outcome(*columns, losses, gradients, value_gradients, self.metrics)

    def micro_batches(
        self, prepared: Prepared, step: int, theta: Tensor, may_skip: bool = False
    ) -> Iterator[tuple[MicroBatch, TokenStats]]:
        """Micro-batches of all ranks, and the table's values of their response tokens."""
        batches = prepared.batch.layout.rank_batches
        steps = prepared.steps if may_skip else [rank.mini_batches for rank in batches]
        for rank, columns, flat, of_rank in zip(batches, prepared.columns, prepared.flat_tokens, steps, strict=True):
            for positions in of_rank[step].micro_batches:
                micro = MicroBatchBuilder(self.view.padded, torch.device("cpu")).build(rank.rows, positions, columns)
                tokens = concatenate_segments(flat, rank.rows.response_offsets, positions)
                yield micro, self.table.stats(theta, np.full(1, -1) if micro.is_dummy else tokens)

    def policy_loss(self, prepared: Prepared, step: int, theta: Tensor) -> Tensor:
        """Loss of a mini-batch. Adds to `metrics`."""
        config, total = self.config, torch.zeros((), dtype=torch.float64)
        for micro, stats in self.micro_batches(prepared, step, theta, may_skip=True):
            matrices = build_objective_inputs(micro, stats)
            actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
            one, sums = compute_policy_objective(matrices, actor, self.loss, correction)
            if config.teacher.uses_full_vocabulary:
                one = one + compute_distillation_loss(matrices, config.teacher)
                sums["loss"] = one
            total = total + one
            for name, value in sums.items():
                known, own = self.metrics.get(name, 0.0), float(value.detach())
                self.metrics[name] = max(known, own) if name.endswith(MAX_SUFFIX) else known + own
        return total

    def value_loss(self, prepared: Prepared, step: int, theta: Tensor) -> Tensor:
        """The critic's loss with theta as its parameters, 0 if the estimator does not use values."""
        total = 0.0 * theta.sum()
        for micro, stats in self.micro_batches(prepared, step, theta):
            columns, values, mask = micro.columns, micro.to_matrix(stats.logprobs), micro.to_matrix(micro.mask)
            if columns.values is None:
                break
            assert columns.returns is not None and columns.value_weights is not None
            old, returns = micro.to_matrix(columns.values), micro.to_matrix(columns.returns)
            losses, _ = value_loss(values, old, returns, mask, 0.5)
            total = total + aggregate_token_losses(losses, mask, columns.value_weights)
        return total
