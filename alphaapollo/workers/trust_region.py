"""TRPO (arXiv 1502.05477): the step of a policy that maximizes its surrogate with KL(old||new) <= delta.

    direction   x = (F + damping)^-1 g by conjugate gradients, without the Fisher matrix F
    step        theta - s x with s = sqrt(2 delta / x^T (F + damping) x)
    line search s is halved until the loss falls and the KL is at most delta

g: gradient of the loss at theta. The KL is exact: over the vocabulary, and a mean over action tokens. Its gradient is 0
at theta, and F is its Hessian there, so F v is the gradient at theta + eps v, divided by eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from alphaapollo.algorithms.kl import Divergence
from alphaapollo.algorithms.natural_gradient import Vector, conjugate_gradient
from alphaapollo.batching.batch import RankBatch
from alphaapollo.models.lm_head import DivergenceTarget, LmHead, LmHeadInput, TokenStats
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.sharding import local_tensor, reshard
from alphaapollo.models.train_state import sum_over_shards
from alphaapollo.workers.model_worker import MetricSums
from alphaapollo.workers.policy_learner import PolicyLearner
from alphaapollo.workers.policy_objective import ObjectiveInputs, TrainedRows
from alphaapollo.workers.policy_plugins import PolicyPlugin

ComputeLoss = Callable[[TrainedRows, MetricSums, list[int]], Tensor]
"""Computes this rank's share of the loss of some rows of a mini-batch, and adds its metrics to the sums."""
MAX_TRIALS = 10  # of a step size, and of eps
OLD_TO_NEW = Divergence("forward")


class TrustRegion(PolicyPlugin):
    """Optimizer of the policy that takes TRPO's steps. It has no state between steps."""

    def __init__(self, worker: PolicyLearner):
        self.worker, self.options = worker, worker.actor.optim
        self.parameters = [p for p in worker.policy.parameters() if p.requires_grad]
        self.is_taking_step = False
        self.old_states: dict[tuple[int, ...], Tensor] = {}
        """Hidden states of the old policy in host memory, by id of the batch and indices of the rows."""
        self.metrics: dict[str, float] = {}
        self.old_head: LmHead | None = None

    @property
    def weights(self) -> Vector:
        """This rank's slices of the trained weights, as views."""
        return [local_tensor(parameter.detach()) for parameter in self.parameters]

    def begin_update(self, batch: RankBatch) -> None:
        self.metrics = dict.fromkeys(("trpo/kl", "trpo/improvement", "trpo/trials", "trpo/rejected"), 0.0)

    def make_divergence_target(
        self, batch: RankBatch, row_indices: list[int], micro: MicroBatch
    ) -> DivergenceTarget | None:
        """Return the old policy's distributions, which the first pass over the rows records."""
        if not self.is_taking_step:
            return None
        key = (id(batch), *row_indices)
        if key not in self.old_states:
            hidden = self.worker.policy.compute_lm_head_input(micro)
            self.old_states[key] = hidden.states.cpu()
            if self.old_head is None:
                bias = None if hidden.head.bias is None else hidden.head.bias.detach().clone()
                self.old_head = replace(hidden.head, weight=hidden.head.weight.detach().clone(), bias=bias)
        assert self.old_head is not None
        states = self.old_states[key].to(self.worker.device)
        return DivergenceTarget(LmHeadInput(states, self.old_head), OLD_TO_NEW)

    def compute_loss(
        self, micro: MicroBatch, stats: TokenStats, inputs: ObjectiveInputs
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return no loss, but the sum of KL(old||new) over action tokens."""
        if not self.is_taking_step:
            return None
        assert stats.divergence is not None
        return stats.logprobs.new_zeros(()), {"trust_region_kl": (micro.mask * stats.divergence.detach()).sum()}

    def take_step(self, trained: Sequence[TrainedRows], compute_loss: ComputeLoss) -> float:
        """Move the weights, given the rows and the gradients of their loss (a collective). Returns the step size s, or
        0 with unchanged weights if no trial of the line search succeeds."""
        gradient, start = self._take_gradient(), [weight.clone() for weight in self.weights]
        evaluate = partial(self._evaluate, trained, compute_loss)
        self.radius = math.sqrt(torch.finfo(start[0].dtype).eps)  # norm of eps v, which _multiply_fisher adapts
        self.is_taking_step = True
        old_loss, _, tokens = evaluate()  # also records the old policy (make_divergence_target)
        multiply = partial(self._multiply_fisher, trained, start, tokens)
        direction, curvature = conjugate_gradient(multiply, gradient, self._dot, self.options.cg_steps)
        step_size = math.sqrt(2.0 * self.options.delta / curvature) if curvature > 0 else 0.0
        for _ in range(MAX_TRIALS if step_size else 0):
            self._set_weights(start, direction, -step_size)
            loss, kl, _ = evaluate()
            self.metrics["trpo/trials"] += 1
            if loss < old_loss and kl <= self.options.delta:
                self.metrics["trpo/kl"] = max(self.metrics["trpo/kl"], kl)
                self.metrics["trpo/improvement"] += old_loss - loss
                break
            step_size /= 2.0
        else:  # no trial succeeded
            self._set_weights(start, direction, 0.0)
            step_size = 0.0
            self.metrics["trpo/rejected"] += 1
        self.is_taking_step, self.old_head = False, None
        self.old_states.clear()
        return step_size

    def get_metrics(self) -> dict[str, float]:
        return self.metrics

    def _multiply_fisher(self, trained: Sequence[TrainedRows], start: Vector, tokens: float, vector: Vector) -> Vector:
        """Compute (F + damping) v from the gradient of the mean KL at theta + eps v. eps is chosen so that log-probs
        change by about the square root of the precision, which balances rounding and curvature."""
        norm, target = math.sqrt(self._dot(vector, vector)), math.sqrt(torch.finfo(start[0].dtype).eps)
        for _ in range(MAX_TRIALS):
            eps = self.radius / norm
            self._set_weights(start, vector, eps)
            product = self._compute_kl_gradient(trained, tokens)
            change = math.sqrt(max(eps * self._dot(vector, product), 0.0))  # sqrt(2 KL)
            self.radius *= min(max(target / max(change, 1e-30), 1e-2), 1e2)
            if 0.1 < change / target < 10.0:
                break
        torch._foreach_div_(product, eps)
        torch._foreach_add_(product, vector, alpha=self.options.cg_damping)
        return product

    def _compute_kl_gradient(self, trained: Sequence[TrainedRows], tokens: float) -> Vector:
        worker = self.worker
        micros = [(rows.batch, micro) for rows in trained for micro in rows.mini_batch.micro_batches]
        for batch, row_indices in worker.state.iterate_micro_batches(micros):
            micro = worker.builder.build(batch.rows, row_indices)
            with torch.no_grad():
                target = self.make_divergence_target(batch, row_indices, micro)
            divergence = worker.policy(micro, worker.temperature, divergence_target=target).divergence
            kl = (micro.mask * divergence).sum() / tokens
            (kl * worker.placement.world_size).backward()  # FSDP averages over the ranks
        return self._take_gradient()

    @torch.no_grad()
    def _evaluate(self, trained: Sequence[TrainedRows], compute_loss: ComputeLoss) -> tuple[float, float, float]:
        """Compute loss, mean KL and number of action tokens of the rows over all ranks."""
        sums = MetricSums(self.worker.data_group)
        for rows in trained:
            for row_indices in rows.mini_batch.micro_batches:
                compute_loss(rows, sums, row_indices)
        totals = sums.reduce(self.worker.device)
        tokens = max(totals["tokens"], 1.0)
        return totals["loss"], totals["trust_region_kl"] / tokens, tokens

    def _take_gradient(self) -> Vector:
        """Return this rank's slices of the gradients, and clear the gradients."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        slices = [local_tensor(gradient) for gradient in gradients]
        self.worker.policy.zero_grad(set_to_none=True)
        return slices

    @torch.no_grad()
    def _set_weights(self, start: Vector, direction: Vector, factor: float) -> None:
        """Set the weights to start + factor * direction."""
        reshard(self.worker.policy)
        torch._foreach_copy_(self.weights, start)
        if factor:
            torch._foreach_add_(self.weights, direction, alpha=factor)

    def _dot(self, left: Vector, right: Vector) -> float:
        parts = [(a * b).sum(dtype=torch.float64) for a, b in zip(left, right, strict=True)]
        return sum_over_shards(torch.stack(parts).sum(), self.parameters[0]).item()
