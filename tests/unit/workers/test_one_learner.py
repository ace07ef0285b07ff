"""Gradients of a user's own loop equal those of main_ppo's update bit for bit, and so does TRPO's step."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from alphaapollo.algorithms.aggregation import row_weights
from alphaapollo.algorithms.policy_losses import get_policy_loss, policy_loss_names
from alphaapollo.batching.batch import Columns
from alphaapollo.config.schema import Actor, Config, RolloutCorrection, Teacher
from alphaapollo.models.moe_routing import ROUTED_EXPERTS
from alphaapollo.models.sharding import local_tensor
from alphaapollo.own_loop.policy_columns import make_columns
from alphaapollo.own_loop.rows import RowReader, distribute, split_by_row
from alphaapollo.types import LONGER_PROMPT, Row
from tests.nightly import at_night
from tests.unit.tiny import VOCABULARY, plan_ranks, some_rows
from tests.unit.workers import training
from tests.unit.workers.layouts import run_on_ranks
from tests.unit.workers.training import Case

READER, MAX_TOKENS, NUM_ROWS = RowReader(None, VOCABULARY, ()), 40, 6
KL: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.3}
FULL_KL = KL | {"kl_loss_type": "full"}


@dataclass(frozen=True)
class Settings:
    """A loss with the settings of a run. old: the rows have old log-probs."""

    loss: str
    actor: dict[str, Any] = field(default_factory=dict)
    correction: dict[str, Any] = field(default_factory=dict)
    old: bool = True


LOSSES = [Settings(name, old=not get_policy_loss(name).on_policy) for name in policy_loss_names()]
TERMS = [
    Settings("ppo", {"entropy_coeff": 0.2}),
    Settings("ppo", KL | {"kl_loss_type": "low_var_kl", "entropy_coeff": 0.1}),
    Settings("gspo", KL | {"kl_loss_type": "unbiased", "loss_agg_mode": "seq-mean-token-mean"}),
    Settings("ppo", {"loss_agg_mode": "seq-mean-token-mean"}, {"method": "tis", "off_policy_mask_threshold": 0.1}),
    Settings("reinforce", correction={"method": "mask", "level": "geometric", "low": 0.5}, old=False),
]


def make_rows(case: Case) -> list[Row]:
    generator, rows = np.random.default_rng(5), []
    for number, row in enumerate(some_rows(NUM_ROWS, 3)):
        size = len(row.token_ids)
        logprobs = np.where(row.action_mask, generator.normal(-4.0, 0.3, size), 0.0)
        columns: dict[str, Any] = {"advantages": generator.normal(size=size)}
        if case.replay:
            columns[ROUTED_EXPERTS] = training.some_experts(row, number)
        if case.contexts and number % 3 != 2:
            columns[LONGER_PROMPT] = training.longer_prompt(row, number)
        rows.append(replace(row, logprobs=logprobs.tolist(), columns=columns))
    return rows


def make_config(case: Case, settings: Settings) -> Config:
    teacher = Teacher(**{"model": {"path": case.teacher_folder}} | case.teacher)
    config, correction = Config(), RolloutCorrection(**settings.correction)
    algorithm = config.algorithm.model_copy(update={"rollout_correction": correction})
    role = config.actor_rollout_ref.model_copy(update={"actor": Actor(**case.actor | settings.actor)})
    return config.model_copy(update={"actor_rollout_ref": role, "algorithm": algorithm, "teacher": teacher})


class Learner:
    """One rank with rows, for update and for an own loop."""

    def __init__(self, case: Case, rank: int, num_ranks: int, address: str):
        self.case, self.rank = case, rank
        self.worker = training.make_worker(case, rank, num_ranks, address)
        if case.lora_rank:
            training.train_by_hand(self.worker.policy)
        self.plan = plan_ranks(num_ranks, MAX_TOKENS)
        self.sampled = self.rows = READER.read(make_rows(case))
        self.layout = distribute(self.rows, self.plan)
        self.batch = self.layout.rank_batches[rank]
        self.worker.load_batch(self.batch)

    def join(self, name: str) -> np.ndarray:
        return np.concatenate([row.columns[name][row.response_start :] for row in self.rows])

    def make_columns_of_driver(self, settings: Settings, own: Columns[np.ndarray]) -> Columns[np.ndarray]:
        """The columns that main_ppo's driver would make."""
        lengths = torch.tensor([sum(row.action_mask) for row in self.rows])
        ids, actor = torch.arange(NUM_ROWS), Actor(**settings.actor)
        taught = torch.tensor([LONGER_PROMPT in row.columns for row in self.rows])
        of_divergence = torch.zeros(NUM_ROWS, dtype=torch.float64)
        of_divergence[taught] = row_weights(lengths[taught], ids[taught], actor.loss_agg_mode, 1.0)
        weights = {
            "loss_weights": row_weights(lengths, ids, actor.loss_agg_mode, 1.0),
            "sequence_weights": row_weights(lengths, ids, "seq-mean-token-sum", 1.0),
        } | ({"divergence_weights": of_divergence} if self.case.contexts else {})
        columns = {name: one.numpy().astype(np.float32) for name, one in weights.items()}
        columns["trajectory_ids"] = np.arange(NUM_ROWS)
        columns["advantages"] = self.join("advantages").astype(np.float32)
        if settings.old:
            columns["old_logprobs"] = self.join("old_logprobs").astype(np.float32)
        made = self.layout.split_columns(Columns(**columns))[self.rank]
        if actor.use_kl_loss and not actor.uses_full_kl:
            made = replace(made, ref_logprobs=self.worker.compute_log_probs("reference"))
        return replace(made, selected_tokens=own.selected_tokens)

    def prepare(self, settings: Settings) -> tuple[Columns[np.ndarray], Columns[np.ndarray]]:
        """Columns of an own loop and of the driver."""
        config, loss = make_config(self.case, settings), get_policy_loss(settings.loss)
        self.worker.actor, self.worker.policy_loss = config.actor_rollout_ref.actor, loss
        self.worker.correction = config.algorithm.rollout_correction
        old = [row.columns["advantages"] * 0.1 + row.logprobs for row in self.sampled]
        self.rows = READER.read(self.sampled, {"old_logprobs": old} if settings.old else {})
        own = make_columns(self.rows, self.layout, loss, config, None, None, 7)[self.rank]
        return own, self.make_columns_of_driver(settings, own)

    def compare_gradients(self, settings: Settings) -> None:
        own, of_driver = self.prepare(settings)
        recorded = training.record_gradients(self.worker)
        metrics = self.worker.update(of_driver, measures_entropy=False)
        del self.worker.state.step
        found, _ = self.worker.accumulate(self.batch, own, settings.loss)
        gradients = training.read_gradients(self.worker)
        self.worker.clear_gradients()
        assert found["loss"] == metrics["actor/loss"], settings
        assert any(gradient.any() for gradient in gradients.values()), settings
        training.assert_close(gradients, recorded[0], atol=0, rtol=0)
        assert found.items() <= {name.removeprefix("actor/"): value for name, value in metrics.items()}.items()

    def compare_steps(self, loss_name: str) -> dict[str, float]:
        """Take main_ppo's step and that of an own loop from the same weights. Returns metrics of the step."""
        worker, trained = self.worker, [local_tensor(one.detach()) for one in self.worker.policy.parameters()]
        start, values = [one.clone() for one in trained], training.gather(worker.compute_log_probs())
        self.rows = READER.read(self.rows, {"old_logprobs": split_by_row(self.layout, self.rows, values)})
        settings = Settings(loss_name, self.case.actor)
        config, loss = make_config(self.case, settings), get_policy_loss(loss_name)
        own = make_columns(self.rows, self.layout, loss, config, None, None, 7)[self.rank]
        of_driver = self.make_columns_of_driver(settings, own)
        metrics_of_update = worker.update(replace(of_driver, old_logprobs=None) if config.uses_trpo else of_driver)
        expected = training.parameters(worker)

        def restart() -> None:
            worker.offload()  # the gathered copies of the weights become invalid
            torch._foreach_copy_(trained, start)
            worker.state.reset_optimizer()
            worker.state.num_steps = 0

        restart()
        worker.accumulate(self.batch, own, loss_name)
        metrics: dict[str, float] = worker.take_step()
        training.assert_close(training.parameters(worker), expected, atol=0, rtol=0)
        of_step = {name: value for name, value in metrics_of_update.items() if name.removeprefix("actor/") in metrics}
        assert {name.removeprefix("actor/"): value for name, value in of_step.items()} == metrics
        restart()
        size = float(sum(sum(row.action_mask) for row in self.rows))
        for rows in (self.rows[:2], self.rows[2:]):
            layout = distribute(rows, self.plan)
            columns = make_columns(rows, layout, loss, config, size, None, 7)[self.rank]
            worker.accumulate(layout.rank_batches[self.rank], columns, loss_name, size)
        assert worker.take_step() == pytest.approx(metrics, rel=0.05) and not worker.accumulated
        return metrics


def compare(
    rank: int, num_ranks: int, address: str, cases: list[tuple[Case, list[Settings]]], steps: dict[str, Case]
) -> Any:
    for number, (case, several) in enumerate(cases):
        learner = Learner(case, rank, num_ranks, address and f"{address}_{number}")
        with closing(learner.worker):
            for settings in several:
                learner.compare_gradients(settings)
    found = {}
    for loss, case in steps.items():
        learner = Learner(case, rank, num_ranks, address and f"{address}_{loss}")
        with closing(learner.worker):
            found[loss] = learner.compare_steps(loss)
    return found


@pytest.mark.parametrize("num_ranks", at_night([1, 2], [1]))
def test_own_loops_have_the_gradients_of_main_ppo(locate: Any, num_ranks: int) -> None:
    case = Case("qwen3", max_tokens=MAX_TOKENS)
    teacher = {"divergence": "jsd", "coef": 0.5}
    cases = [
        (replace(case, needs_reference=True), [*LOSSES, *TERMS, Settings("ppo", FULL_KL)]),
        (replace(case, lora_rank=2, needs_reference=True), [*LOSSES, *TERMS]),
        (
            replace(case, lora_rank=2, teacher=teacher, teacher_folder="llama"),
            [Settings("ppo", {"entropy_coeff": 0.1})],
        ),
        (replace(case, folder="qwen3_moe", aux=0.5, replay=True), [Settings("ppo")]),
        (
            replace(case, contexts=True, teacher={"divergence": "reverse", "self_teacher": {"context": "feedback"}}),
            [Settings("ppo")],
        ),
    ]
    optim = {"name": "trpo", "delta": 0.01, "cg_damping": 0.5, "cg_steps": 3}
    steps = {
        "surrogate": replace(case, actor={"policy_loss": {"loss_mode": "surrogate"}, "optim": optim}),
        "ppo_kl": replace(case, actor={"policy_loss": {"loss_mode": "ppo_kl"}, "optim": {"lr": 1e-2}}),
    }
    located = [(locate(one), settings) for one, settings in cases]
    for found in run_on_ranks(compare, num_ranks, located, {name: locate(one) for name, one in steps.items()}):
        assert found["surrogate"]["trpo/improvement"] > 0 and 0 < found["surrogate"]["trpo/kl"] <= 0.01
        assert found["ppo_kl"]["policy_kl"] > 0
