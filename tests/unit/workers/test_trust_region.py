"""TRPO's step compared with a dense Fisher matrix of a plain model, on several ranks, and with LoRA."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import Columns
from alphaapollo.models.float64_mode import Float64Mode
from alphaapollo.models.lora import is_adapter_parameter
from alphaapollo.workers import trust_region
from alphaapollo.workers.policy import PolicyWorker
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.training import Case

TEMPERATURE, DELTA, DAMPING = 0.9, 0.01, 2.0
SIZES: dict[str, Any] = {"num_rows": 4, "mini_batch_size": 4, "max_tokens": 40}
CG_STEPS = 40  # for a direction that is exact to 1e-6
TRPO: dict[str, Any] = {"name": "trpo", "delta": DELTA, "cg_damping": DAMPING}


def actor(**optim: Any) -> dict[str, Any]:
    return {"policy_loss": {"loss_mode": "surrogate"}, "optim": TRPO | optim, "grad_clip": 1e9}


class DenseTrpo:
    """TRPO's step of a plain model in float64, with the dense Fisher matrix."""

    def __init__(self, folder: str, worker: PolicyWorker, columns: Columns):
        from transformers import AutoModelForCausalLM

        arguments: Any = {"dtype": torch.float64, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **arguments).eval()
        self.named = dict(self.model.named_parameters())
        self.rows = list(training.iterate_rows(worker.batch.rows))
        weights, advantages = torch.from_numpy(columns.loss_weights), torch.from_numpy(columns.advantages)
        self.weights = [weights[row] * advantages[part][mask] for row, (_, _, part, mask) in enumerate(self.rows)]
        self.old = [self.log_probs(row).detach() for row in range(len(self.rows))]
        self.tokens = sum(int(mask.sum()) for *_, mask in self.rows)

    def log_probs(self, row: int) -> torch.Tensor:
        """Log-probs over the vocabulary before each action token of a row. [actions, V]"""
        ids, start, _, mask = self.rows[row]
        logits = self.model(ids[None].long()).logits[0, start - 1 : -1] / TEMPERATURE
        return logits.log_softmax(-1)[mask]

    def chosen(self, row: int, logp: torch.Tensor) -> torch.Tensor:
        ids, start, _, mask = self.rows[row]
        return logp.gather(1, ids[start:][mask].long()[:, None])[:, 0]

    def loss_and_kl(self) -> tuple[torch.Tensor, torch.Tensor]:
        loss, kl = torch.zeros(()).double(), torch.zeros(()).double()
        for row, old in enumerate(self.old):
            logp = self.log_probs(row)
            ratio = (self.chosen(row, logp) - self.chosen(row, old)).exp()
            loss = loss - (self.weights[row] * ratio).sum()
            kl = kl + (old.exp() * (old - logp)).sum() / self.tokens
        return loss, kl

    def fisher(self) -> torch.Tensor:
        """Mean over action tokens of sum_v p_v grad log p_v (grad log p_v)^T."""
        parameters, total = [*self.named.values()], 0.0
        for row in range(len(self.rows)):
            logp = self.log_probs(row).flatten()
            parts = torch.autograd.grad(logp, parameters, torch.eye(len(logp)).double(), is_grads_batched=True)
            jacobian = torch.cat([part.flatten(1) for part in parts], dim=1)
            total = total + jacobian.T @ (logp.exp()[:, None] * jacobian) / self.tokens
        return total

    def step(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Direction, and the accepted step with the number of trials."""
        loss, _ = self.loss_and_kl()
        gradients = torch.autograd.grad(loss, [*self.named.values()])
        gradient = torch.cat([one.flatten() for one in gradients])
        damped = self.fisher() + DAMPING * torch.eye(len(gradient)).double()
        direction = torch.linalg.solve(damped, gradient).detach()
        size = math.sqrt(2 * DELTA / float(direction @ damped @ direction))
        start = torch.nn.utils.parameters_to_vector(self.named.values()).detach()
        for trial in range(1, 11):
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(start - size * direction, self.named.values())
                new_loss, kl = self.loss_and_kl()
            if new_loss < loss and kl <= DELTA:
                return direction, -size * direction, trial
            size /= 2
        raise AssertionError("no trial succeeds")


def flatten(named: dict[str, np.ndarray], order: list[str]) -> np.ndarray:
    return np.concatenate([named[f"model.{name}"].ravel() for name in order])


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_step_equals_that_of_a_dense_fisher_matrix(
    locate: Any, close_later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    solve = trust_region.conjugate_gradient

    def record(*arguments: Any) -> Any:
        direction, curvature = solve(*arguments)
        found.extend(direction)
        return direction, curvature

    monkeypatch.setattr(trust_region, "conjugate_gradient", record)
    with Float64Mode():
        case = locate(Case("three_layers", actor=actor(cg_steps=CG_STEPS), dtype="float64", **SIZES))
        worker = close_later(training.make_worker(case))
        batch = training.make_batch(case)
        assert len(batch.rank_batches[0].mini_batches[0].micro_batches) > 1
        worker.load_batch(batch.rank_batches[0])
        columns = training.make_columns(case, batch, old=False)
        before = training.parameters(worker)
        metrics = worker.update(columns)
        dense = DenseTrpo(case.folder, worker, columns)
        direction, step, trials = dense.step()
    order, names = [*dense.named], [name for name, _ in worker.policy.named_parameters()]
    named = {name: part.numpy() for name, part in zip(names, found, strict=True)}
    assert relative(flatten(named, order), direction.numpy()) < 1e-6
    moved = flatten(training.parameters(worker), order) - flatten(before, order)
    assert relative(moved, step.numpy()) < 1e-6
    assert metrics["trpo/trials"] == trials and metrics["trpo/rejected"] == 0.0
    assert metrics["trpo/improvement"] > 0
    _, kl = dense.loss_and_kl()
    assert metrics["trpo/kl"] == pytest.approx(float(kl), rel=1e-6) and metrics["trpo/kl"] <= DELTA


def step_on_ranks(rank: int, num_ranks: int, address: str, case: Case) -> tuple[Any, Any, Any]:
    """Weights before and after a step, and metrics."""
    with Float64Mode() if case.dtype == "float64" else nullcontext():
        worker = training.make_worker(case, rank, num_ranks, address)
        if case.lora_rank:
            training.train_by_hand(worker.policy)  # nonzero adapters
        batch = training.make_batch(case, num_ranks)
        worker.load_batch(batch.rank_batches[rank])
        before = training.parameters(worker)
        metrics = worker.update(training.make_columns(case, batch, rank, old=False))
        after = training.parameters(worker)
        worker.close()
    return before, after, {name: value for name, value in metrics.items() if name.startswith("trpo/")}


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_ranks_take_the_same_step(locate: Any, lora_rank: int) -> None:
    case = locate(Case("three_layers", actor=actor(cg_steps=3), lora_rank=lora_rank, dtype="float64", **SIZES))
    before, expected, metrics = step_on_ranks(0, 1, "", case)
    assert metrics["trpo/rejected"] == 0.0 and 0 < metrics["trpo/kl"] <= DELTA
    changed = {name for name in expected if (expected[name] != before[name]).any()}
    assert changed == {name for name in before if is_adapter_parameter(name) or not lora_rank}
    for _, found, of_rank in run_ranks(step_on_ranks, 2, case, timeout=200):
        training.assert_close(found, expected, atol=1e-6, rtol=0)
        assert of_rank == pytest.approx(metrics, rel=1e-6)


def test_a_step_that_cannot_improve_is_rejected(locate: Any) -> None:
    """Without advantages the loss is constant."""
    case = locate(Case("three_layers", actor=actor(cg_steps=2), no_advantages=True))
    before, after, metrics = step_on_ranks(0, 1, "", case)
    training.assert_close(after, before, atol=0, rtol=0)
    assert metrics == {"trpo/kl": 0.0, "trpo/improvement": 0.0, "trpo/trials": 0.0, "trpo/rejected": 1.0}


def test_float32_steps_meet_the_constraint(start: Any) -> None:
    """A step is halved if its KL is over the limit, which rounding decides here."""
    worker, columns = start(Case("three_layers", actor=actor(cg_steps=5, cg_damping=0.1), mini_batch_size=5))
    metrics = worker.update(replace(columns, old_logprobs=None))
    assert metrics["actor/optimizer_steps"] == 2.0 and metrics["trpo/trials"] in (2.0, 3.0)
    assert 0 < metrics["trpo/kl"] <= DELTA
