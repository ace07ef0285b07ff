"""A micro-batch never waits for the device: forward and backward run on meta tensors, which have no values to wait for,
and copies to the device are asynchronous."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alphaapollo.algorithms.kl import REVERSE
from alphaapollo.algorithms.policy_losses import get_policy_loss, policy_loss_names
from alphaapollo.config.schema import Actor, RolloutCorrection
from alphaapollo.models.attention import register_attn_implementation
from alphaapollo.models.lm_head import DivergenceTarget
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel
from alphaapollo.workers.model_worker import MetricSums
from alphaapollo.workers.policy_objective import build_objective_inputs, compute_policy_objective
from tests.unit.tiny import build_model
from tests.unit.workers.training import Case, make_batch, make_columns

META = torch.device("meta")


class SynchronousCopies(TorchDispatchMode):
    """Count copies from host to device that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = [one.device.type for one in args if isinstance(one, torch.Tensor)]
        if isinstance(out, torch.Tensor) and out.device == META and "cpu" in before and not kwargs.get("non_blocking"):
            self.count += 1
        return out


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    model = build_model("qwen3").to(META)
    model.set_attn_implementation(register_attn_implementation("sdpa"))
    return PolicyModel(model)


@pytest.mark.parametrize("loss", policy_loss_names())
@pytest.mark.parametrize("first", [False, True], ids=["old given", "old from this pass"])
def test_a_micro_batch_does_not_wait(policy: PolicyModel, loss: str, first: bool):
    actor = {"policy_loss": {"loss_mode": loss}, "use_kl_loss": True, "kl_loss_type": "full", "entropy_coeff": 0.1}
    case = Case("", actor, "sdpa")
    batch = make_batch(case, 1)
    columns = make_columns(case, batch, 0, old=not first)
    (positions,) = batch.rank_batches[0].mini_batches[0].micro_batches
    with SynchronousCopies() as copies:
        micro = MicroBatchBuilder(False, META).build(batch.rank_batches[0].rows, positions, columns)
        target = DivergenceTarget(policy.compute_lm_head_input(micro), REVERSE)
        stats = policy(micro, 0.9, needs_entropy=True, divergence_target=target)
        matrices = build_objective_inputs(micro, stats, stats.logprobs.detach() if first else None)
        objective, metrics = compute_policy_objective(
            matrices, Actor(**actor), get_policy_loss(loss), RolloutCorrection()
        )
        objective.backward()
        MetricSums().add(metrics)
    assert copies.count == 0
    assert all(parameter.grad is not None for parameter in policy.parameters())
