"""A small differentiable table in place of the model, in float64, with the worker's objective.

Token i has log-prob b_i + f_i theta, entropy softplus(g_i theta) and full KL softplus(h_i theta). Ranks are simulated
one after the other and their gradients are added, which equals FSDP's mean of the scaled losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from alphaapollo.algorithms.aggregation import aggregate_token_losses, value_loss
from alphaapollo.algorithms.policy_losses import PolicyLoss
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


def update(
    make: Callable[[], Prepared], view: View, table: Table, config: Config, loss: PolicyLoss, num_tokens: int
) -> Outcome:
    """Gradient descent over the mini-batches. `make` prepares the case; a rebuilt view calls it at every step."""
    prepared, actor = make(), config.actor_rollout_ref.actor
    theta, losses, gradients, value_gradients = torch.zeros(SIZE, dtype=torch.float64), [], [], []
    metrics: dict[str, float] = {}
    for _ in range(actor.ppo_epochs):
        for step in range(len(prepared.batch.layout.mini_batch_rows)):
            prepared, theta = (make(), copy.deepcopy(theta)) if view.resumed else (prepared, theta)
            leaf = theta.clone().requires_grad_()
            total = policy_step(prepared, step, view, table, leaf, config, loss, metrics)
            (gradient,) = torch.autograd.grad(total, leaf, materialize_grads=True)
            losses.append(float(total.detach()))
            gradients.append(gradient)
            value_gradients.append(value_step(prepared, step, view, table, leaf))
            theta = theta - LEARNING_RATE * gradient
    columns = [prepared.by_token(name, num_tokens) for name in ("advantages", "returns")]
    return Outcome(*columns, losses, gradients, value_gradients, metrics)


def micro_batches(prepared: Prepared, step: int, padded: bool):
    """(micro-batch, numbers of its response tokens) over all ranks."""
    ranks = zip(prepared.batch.layout.rank_batches, prepared.columns, prepared.flat_tokens, strict=True)
    for rank, columns, flat in ranks:
        for positions in rank.mini_batches[step].micro_batches:
            micro = MicroBatchBuilder(padded, torch.device("cpu")).build(rank.rows, positions, columns)
            tokens = concatenate_segments(flat, rank.rows.response_offsets, positions)
            yield micro, np.full(1, -1) if micro.is_dummy else tokens


def policy_step(
    prepared: Prepared,
    step: int,
    view: View,
    table: Table,
    theta: Tensor,
    config: Config,
    loss: PolicyLoss,
    metrics: dict[str, float],
) -> Tensor:
    """Loss of a mini-batch. Adds to `metrics`."""
    actor, total = config.actor_rollout_ref.actor, torch.zeros((), dtype=torch.float64)
    for micro, tokens in micro_batches(prepared, step, view.padded):
        matrices = build_objective_inputs(micro, table.stats(theta, tokens))
        one, sums = compute_policy_objective(matrices, actor, loss, config.algorithm.rollout_correction)
        if config.teacher.uses_full_vocabulary:
            one = one + compute_distillation_loss(matrices, config.teacher)
            sums["loss"] = one
        total = total + one
        for name, value in sums.items():
            known, own = metrics.get(name, 0.0), float(value.detach())
            metrics[name] = max(known, own) if name.endswith(MAX_SUFFIX) else known + own
    return total


def value_step(prepared: Prepared, step: int, view: View, table: Table, theta: Tensor) -> Tensor:
    """Gradient of the critic's loss with theta as its parameters, if the estimator uses values."""
    total = 0.0 * theta.sum()
    for micro, tokens in micro_batches(prepared, step, view.padded):
        if micro.columns.values is None:
            return torch.zeros_like(theta)
        total = total + _value_loss(micro, micro.to_matrix(table.stats(theta, tokens).logprobs))
    return torch.autograd.grad(total, theta, materialize_grads=True)[0]


def _value_loss(micro: MicroBatch, values: Tensor) -> Tensor:
    columns, mask = micro.columns, micro.to_matrix(micro.mask)
    assert columns.values is not None and columns.returns is not None and columns.value_weights is not None
    losses, _ = value_loss(values, micro.to_matrix(columns.values), micro.to_matrix(columns.returns), mask, 0.5)
    return aggregate_token_losses(losses, mask, columns.value_weights)
