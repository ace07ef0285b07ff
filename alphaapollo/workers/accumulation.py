"""Gradients and optimizer steps of the policy on request, for loops of one's own (own_loop/).

The loss of a call is a sum over the tokens of all ranks, divided by a denominator that the caller chooses. Therefore
neither value nor gradient depends on the split into calls, ranks and micro-batches. The load-balancing loss of a
mixture of experts is computed for each micro-batch, as in main_ppo, with the micro-batch's share of the denominator.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from alphaapollo.algorithms.policy_losses import PolicyLossInputs, get_policy_loss
from alphaapollo.algorithms.user_functions import check_float_tensor, explain_user_errors
from alphaapollo.batching.batch import TARGETS, WEIGHTS, RankBatch
from alphaapollo.models.micro_batch import MicroBatch
from alphaapollo.workers.model_worker import MetricSums, TokenParts, merge_token_values
from alphaapollo.workers.policy import PolicyWorker

LossFunction = Callable[[Tensor, dict[str, Tensor]], Tensor]
"""(log-probs [b, L], columns [b, L] or [b]) -> loss of each token [b, L], or of each row [b]. Column 0 is the first
token that a row is trained on."""
Sum = tuple[Tensor, Tensor]  # of losses, and the number of tokens or rows


def cross_entropy(logp: Tensor, columns: dict[str, Tensor]) -> Tensor:
    return -logp


def accumulate(
    worker: PolicyWorker, batch: RankBatch, loss: str | bytes, denominator: float
) -> tuple[dict[str, float], np.ndarray]:
    """Add the gradients of a batch to those of earlier calls (a collective). Returns sums of loss and metrics over all
    ranks, and this rank's log-probs [response tokens]. loss: name of a policy loss, or a pickled LossFunction.

    Raises ValueError on all ranks if the loss fails or is not finite on one of them. The gradients are then unchanged.
    """
    (mini_batch,) = batch.mini_batches
    function = pickle.loads(loss) if isinstance(loss, bytes) else None
    sums, parts, errors = MetricSums(worker.data_group), TokenParts(), list[Exception]()
    parameters = [parameter for parameter in worker.policy.parameters() if parameter.requires_grad]
    earlier = [parameter.grad for parameter in parameters]
    worker.policy.zero_grad(set_to_none=True)
    worker.state.reload()
    balancer = worker.make_expert_load_balancer(worker.policy.routers)

    def compute_loss(row_indices: list[int]) -> Tensor:
        micro = worker.builder.build(batch.rows, row_indices)
        logprobs = worker.policy(micro, worker.temperature).logprobs
        parts.append((row_indices, micro.drop_dummy_row(logprobs.detach())))
        total, count, metrics = logprobs.sum() * 0.0, micro.mask.sum() * 0.0, dict[str, Tensor]()
        try:
            if function is None:
                total, count, metrics = compute_policy_loss(worker, micro, logprobs, str(loss))
            elif not micro.is_dummy:
                total, count = call_loss_function(worker, micro, logprobs, function)
        except Exception as error:  # noqa: BLE001 raised below, because the other ranks wait for this one's passes
            errors.append(error)
        sums.add(metrics | {"loss": total / denominator})
        if balancer is None or not balancer.coefficient:
            return total / denominator
        dist.all_reduce(count, group=worker.data_group)
        return total / denominator + balancer.compute_last_pass_loss(count / denominator)

    worker.accumulate_gradients(batch.rows, mini_batch, compute_loss)
    messages = [""] * dist.get_world_size()
    dist.all_gather_object(messages, "".join(str(error) or repr(error) for error in errors[:1]))
    failed = next(filter(None, messages), "")
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if failed or parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad.add_(gradient)
    if failed:
        raise ValueError(failed) from next(iter(errors), None)
    return sums.reduce(worker.device), merge_token_values(batch.rows, parts)


def take_step(worker: PolicyWorker, lr: float | None, grad_clip: float | None) -> dict[str, float]:
    """Take an optimizer step with the accumulated gradients, and clear them (a collective). None: as configured. Raises
    FloatingPointError if they are not finite. The weights are then unchanged."""
    worker.state.reload()
    step = worker.state.step(skip_bad_step=True, lr=lr, grad_clip=grad_clip)
    worker.offload()
    if step.skipped:
        worker.state.num_skipped = 0
        raise FloatingPointError(
            f"the gradient norm is {step.grad_norm}. The weights are unchanged, and the gradients are dropped. Lower "
            "the learning rate, or check the columns of the rows for huge values."
        )
    return {"grad_norm": step.grad_norm, "lr": step.lr}


def call_loss_function(worker: PolicyWorker, micro: MicroBatch, logp: Tensor, function: LossFunction) -> Sum:
    """Sum the loss of a user's function over the tokens of a micro-batch, with their weights, or over its rows."""
    columns, logp = make_columns(worker, micro), micro.to_matrix(logp)
    with explain_user_errors(function, "the loss"):
        losses = function(logp, dict(columns))
        check_float_tensor("the result", losses, logp.shape if getattr(losses, "ndim", 2) == 2 else logp.shape[:1])
        if not losses.requires_grad:
            raise ValueError("the result does not depend on the log-probs")
        return sum_losses(losses, columns)


def compute_policy_loss(
    worker: PolicyWorker, micro: MicroBatch, logprobs: Tensor, name: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum a registered policy loss in the same way. Returns also the sums of its metrics."""
    columns, engine = make_columns(worker, micro), micro.to_matrix(micro.rollout_logprobs).to(logprobs.dtype)
    logp = micro.to_matrix(logprobs)
    known = torch.where(engine.isnan(), logp.detach(), engine)  # NaN: only of losses without a ratio to it
    found = [columns.get("old_logprobs", known), columns["advantages"]]
    old, advantages = (one if one.ndim == 2 else one[:, None].expand_as(engine) for one in found)
    inputs = PolicyLossInputs(logp, old, advantages, columns["mask"], engine)
    output = get_policy_loss(name)(inputs, worker.actor)
    return *sum_losses(output.loss + output.penalty, columns), output.metrics


def make_columns(worker: PolicyWorker, micro: MicroBatch) -> dict[str, Tensor]:
    """Return the columns of a micro-batch's rows, with `mask` (1 on trained tokens) and `weights` of tokens."""
    found: dict[str, Any] = {"mask": micro.mask, WEIGHTS: micro.mask, **micro.rows.columns}
    for name, column in found.items():
        if not isinstance(column, Tensor):
            array = micro.rows.take_responses(column) if isinstance(column, np.ndarray) else np.array(column)
            found[name] = worker.builder.to_device(array)
        if not isinstance(column, tuple):
            found[name] = micro.to_matrix(found[name])
    return {name: column for name, column in found.items() if name != TARGETS}


def sum_losses(losses: Tensor, columns: dict[str, Tensor]) -> Sum:
    count = columns["mask"].sum() if losses.ndim == 2 else columns["mask"].any(dim=1).sum().float()
    if losses.ndim == 2:
        losses = torch.where(columns["mask"].bool(), losses, 0.0) * columns[WEIGHTS]
    if not losses.isfinite().all():
        bad = losses.detach().flatten()[~losses.isfinite().flatten()][:4].tolist()
        raise ValueError(f"the loss is not finite: {bad}. Check the columns and the weights of the rows")
    return losses.sum(), count
