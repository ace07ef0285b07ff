"""The two operations of training a policy: accumulate the gradients of rows, and take an optimizer step.

The update of an iteration (policy.py) and a user's own loop (own_loop/) consist of these operations, so the loss of a
micro-batch, with the terms of all plug-ins, is computed in one place.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.algorithms.policy_losses import PolicyLoss, get_policy_loss
from alphaapollo.algorithms.policy_losses.ppo import old_policy_penalty
from alphaapollo.algorithms.statistics import clamp_log_ratio
from alphaapollo.batching.batch import Columns, MiniBatch, RankBatch, Rows
from alphaapollo.config.schema import Actor, RolloutCorrection
from alphaapollo.models.lm_head import TokenStats
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.models.policy import PolicyModel
from alphaapollo.models.train_state import AS_CONFIGURED, AdamSettings, OptimizerStep
from alphaapollo.workers.loss_functions import UserLoss
from alphaapollo.workers.model_worker import MetricSums, TrainingWorker, compute_token_outputs, merge_token_values
from alphaapollo.workers.policy_objective import (
    TrainedRows,
    build_objective_inputs,
    compute_policy_objective,
    normalize_metrics,
)
from alphaapollo.workers.policy_plugins import REFERENCE, PolicyPlugin
from alphaapollo.workers.shared_prompt_check import SharedPromptCheck


class PolicyLearner(TrainingWorker):
    """Training rank of a policy with plug-ins."""

    actor: Actor
    correction: RolloutCorrection
    policy: PolicyModel
    plugins: list[PolicyPlugin]
    shared_prompts: SharedPromptCheck
    compute_sample_logprobs: Callable[[MicroBatch], Tensor]
    temperature: float
    seed: int
    accumulated: list[TrainedRows]  # rows whose gradients the next step uses

    def find_plugin(self, role: str) -> Any:
        """Return the plug-in with this role; None if the run has none."""
        return next((plugin for plugin in self.plugins if plugin.role == role), None)

    def accumulate(
        self,
        batch: RankBatch,
        columns: Columns[np.ndarray],
        loss: str | bytes,
        denominator: float | None = None,
        kl_coef: float | None = None,
    ) -> tuple[dict[str, float], np.ndarray]:
        """Add the gradients of a batch with one mini-batch to those of earlier calls, for the next `take_step`. Returns
        the loss and metrics over all ranks, and this rank's log-probs [response tokens].

        Args:
            columns: inputs of a policy loss, whose weights include the denominator. Missing old log-probs are taken
                from this forward pass, and missing log-probs of a reference are computed.
            loss: name of a policy loss, or a pickled LossFunction, which gets the columns of the batch's rows.
            denominator: divides the sums over tokens (or rows) in a function's loss and in the experts' load-balancing
                loss, if a step has several calls; None: this call has all tokens of the step.
            kl_coef: coefficient of ppo_kl; None: the configured one.

        Raises ValueError on all ranks if the loss fails or is not finite on one of them. The gradients are unchanged.
        """
        self.state.reload()
        sums, errors = MetricSums(self.data_group), list[Exception]()
        if isinstance(loss, bytes):
            assert denominator is not None
            policy_loss: PolicyLoss | UserLoss = UserLoss(pickle.loads(loss), denominator)
        else:
            policy_loss = get_policy_loss(loss)
            if self.actor.use_kl_loss and not self.actor.uses_full_kl and columns.ref_logprobs is None:
                columns = replace(columns, ref_logprobs=self.find_plugin(REFERENCE).compute_log_probs(batch))
            for plugin in self.plugins:
                plugin.begin_update(batch)
        recorded, needs_entropy = list[tuple[list[int], Tensor]](), self.actor.entropy_coeff > 0
        (mini_batch,) = batch.mini_batches
        trained = TrainedRows(batch, mini_batch, policy_loss, columns, kl_coef, needs_entropy, recorded, errors)
        parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        earlier_gradients = [parameter.grad for parameter in parameters]
        self.policy.zero_grad(set_to_none=True)
        self.balancer = self.make_expert_load_balancer(self.policy.routers)
        if self.balancer:
            self.balancer.denominator = denominator
        self._add_gradients(trained, sums)
        messages = [""] * dist.get_world_size()
        dist.all_gather_object(messages, "".join(str(error) or repr(error) for error in errors[:1]))
        message = next(filter(None, messages), "")
        for parameter, gradient in zip(parameters, earlier_gradients, strict=True):
            if message or parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:
                parameter.grad.add_(gradient)
        if message:
            self.accumulated.pop()
            raise ValueError(message) from next(iter(errors), None)
        totals = sums.reduce(self.device)
        metrics = totals if isinstance(loss, bytes) else normalize_metrics(totals, 1)
        metrics |= self.balancer.compute_metrics() if self.balancer else {}
        return metrics, merge_token_values(batch.rows, recorded)

    def take_step(
        self, lr: float | None = None, grad_clip: float | None = None, adam: AdamSettings = AS_CONFIGURED
    ) -> dict[str, float]:
        """Take an optimizer step with the accumulated gradients, and clear them (a collective). lr, grad_clip: None =
        as configured. Raises FloatingPointError, with unchanged weights, if the gradients are not finite."""
        self.state.reload()
        adapts, loss_name = self.actor.policy_loss.adapts_kl_coef, self.actor.policy_loss.loss_mode
        measured = [rows for rows in self.accumulated if adapts and getattr(rows.loss, "name", "") == loss_name]
        step = self._step(skip_bad_step=True, lr=lr, grad_clip=grad_clip, adam=adam)
        if step.skipped:
            self.state.num_skipped = 0  # the caller gets an error for each skipped step
            self.offload()
            raise FloatingPointError(
                f"the gradient norm is {step.grad_norm}. The weights are unchanged, and the gradients are dropped. "
                "Lower the learning rate, or check the columns of the rows for huge values."
            )
        metrics = {"grad_norm": step.grad_norm, "lr": step.lr} | self._get_plugin_metrics()
        if measured:
            metrics |= self._measure_policy_kl([(rows.batch, [rows.mini_batch], rows.columns) for rows in measured])
        self.offload()
        return metrics

    def clear_gradients(self) -> None:
        self.policy.zero_grad(set_to_none=True)
        self.accumulated.clear()

    def _add_gradients(self, trained: TrainedRows, sums: MetricSums) -> None:
        """Add the gradients of rows to the accumulated ones, and their metrics to the sums."""
        self.accumulate_gradients(trained.batch.rows, trained.mini_batch, partial(self._compute_loss, trained, sums))
        needs_entropy = self.actor.entropy_coeff > 0  # TRPO computes the loss of these rows again, without metrics
        self.accumulated.append(replace(trained, needs_entropy=needs_entropy, logprobs=None, errors=None))

    def _step(
        self,
        skip_bad_step: bool,
        lr: float | None = None,
        grad_clip: float | None = None,
        adam: AdamSettings = AS_CONFIGURED,
    ) -> OptimizerStep:
        """Take an optimizer step with the accumulated gradients."""
        try:
            step = self.state.step(skip_bad_step, lr, grad_clip, adam)
        finally:
            self.accumulated = []
        for plugin in self.plugins:
            plugin.end_step()
        return step

    def _get_plugin_metrics(self) -> dict[str, float]:
        return {name: value for plugin in self.plugins for name, value in plugin.get_metrics().items()}

    def _measure_policy_kl(
        self, trained: Sequence[tuple[RankBatch, Sequence[MiniBatch], Columns[np.ndarray]]]
    ) -> dict[str, float]:
        """Estimate KL(old||new) over rows that were trained on, in nats per token, weighted as in the loss (a
        collective)."""
        sums = MetricSums(self.data_group)
        for batch, mini_batches, columns in trained:
            assert columns.old_logprobs is not None and columns.loss_weights is not None
            new = self._compute_log_probs(batch.rows, mini_batches)
            tokens = find_trained_tokens(batch.rows, mini_batches)
            log_ratio = torch.from_numpy((new - columns.old_logprobs)[tokens].astype(np.float64))
            weights = torch.from_numpy(np.repeat(columns.loss_weights, batch.rows.response_lengths)[tokens]).double()
            kl = (weights * old_policy_penalty(clamp_log_ratio(log_ratio))).sum()
            sums.add({"kl": kl, "weights": weights.sum()})
        totals = sums.reduce(self.device)
        return {"policy_kl": totals["kl"] / (totals["weights"] or 1.0)}

    def _compute_log_probs(self, rows: Rows, mini_batches: Sequence[MiniBatch]) -> np.ndarray:
        """Compute log-probs of the rows in `mini_batches`, and 0 for other rows. float32 [response tokens]"""
        return compute_token_outputs(self.policy, self.compute_sample_logprobs, rows, mini_batches, self.builder)

    def _compute_loss(self, trained: TrainedRows, sums: MetricSums, row_indices: list[int]) -> Tensor:
        """Compute the loss of one micro-batch, with the terms of all plug-ins, and add its metrics to the sums."""
        batch = trained.batch
        plugins = [] if isinstance(trained.loss, UserLoss) else self.plugins
        micro = self.builder.build(batch.rows, row_indices, trained.columns)
        with torch.no_grad():
            targets = (plugin.make_divergence_target(batch, row_indices, micro) for plugin in plugins)
            target = next((target for target in targets if target is not None), None)
        stats = self.policy(micro, self.temperature, trained.needs_entropy, target)
        if trained.logprobs is not None:
            trained.logprobs.append((row_indices, micro.drop_dummy_row(stats.logprobs.detach())))
        try:
            loss, count, metrics = self._compute_objective(trained, micro, stats)
        except Exception as error:  # other ranks wait for this rank's passes, so `accumulate` raises the error later
            if trained.errors is None:
                raise
            trained.errors.append(error)
            loss, count, metrics = stats.logprobs.sum() * 0.0, stats.logprobs.new_zeros(()), {}
        if self.balancer:
            self.balancer.num_counted = count.float()
        sums.add(metrics | {"loss": loss})
        return loss

    def _compute_objective(
        self, trained: TrainedRows, micro: MicroBatch, stats: TokenStats
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, the number of tokens (or rows) in it, and metrics to sum."""
        if isinstance(trained.loss, UserLoss):
            return *trained.loss(micro, stats.logprobs, self.builder), {}
        inputs = build_objective_inputs(micro, stats, trained.kl_coef)
        loss, metrics = compute_policy_objective(inputs, self.actor, trained.loss, self.correction)
        for plugin in self.plugins:
            if (loss_and_metrics := plugin.compute_loss(micro, stats, inputs)) is not None:
                plugin_loss, plugin_metrics = loss_and_metrics
                loss, metrics = loss + plugin_loss, metrics | plugin_metrics
        if trained.errors is not None and not loss.isfinite():
            raise ValueError(f"the loss is not finite: {loss.item()}. Check the columns and the weights of the rows")
        return loss, metrics.get("rows", metrics["tokens"]), metrics


def find_trained_tokens(rows: Rows, mini_batches: Sequence[MiniBatch]) -> np.ndarray:
    """Return the positions of the action tokens of the rows in `mini_batches`, among all response tokens."""
    is_trained_row = np.zeros(len(rows), dtype=bool)
    is_trained_row[[row for mini_batch in mini_batches for row in mini_batch.row_indices]] = True
    return np.flatnonzero(rows.action_mask & np.repeat(is_trained_row, rows.response_lengths))
