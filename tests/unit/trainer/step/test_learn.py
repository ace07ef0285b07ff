from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.algorithms.mismatch import sum_mismatch
from alphaapollo.config.keys import replace_value
from alphaapollo.config.schema import Config
from alphaapollo.observability.timing import Timer
from alphaapollo.session.progress import Progress, RecentGroups
from alphaapollo.trainer.step.learn import learn
from tests.unit.trainer.fakes import make_plan, make_run_state
from tests.unit.trainer.samples import group, trajectory


class Workers:
    """Policy and critic: log-probs, reference log-probs and values are -1."""

    def __init__(self) -> None:
        self.updates = 0
        self.policy = self.critic = self

    def load_batch(self, batches: Any) -> None:
        self.batches = batches

    async def offload(self) -> None:
        pass

    async def compute_log_probs(self, role: str = "policy") -> list[np.ndarray]:
        return [np.full_like(rank.rows.rollout_logprobs, -1.0) for rank in self.batches]

    compute_values = compute_log_probs

    async def update(self, columns: Any, *arguments: Any) -> Any:
        self.updates += 1
        if len(arguments) == 1:  # of the critic
            return {}
        self.columns, (*_, self.measures_entropy, self.measures_mismatch, _) = columns, arguments
        old = [np.full_like(rank.rows.rollout_logprobs, -2.0) for rank in self.batches]
        return {}, [sum_mismatch(*np.zeros((4, 0), dtype=np.int64))], old if self.measures_mismatch else []


class NanReference(Workers):
    """Reference log-probs are NaN."""

    async def compute_log_probs(self, role: str = "policy") -> list[np.ndarray]:
        value = np.nan if role == "reference" else -1.0
        return [np.full_like(rank.rows.rollout_logprobs, value) for rank in self.batches]


GROUP = group(trajectory(0, 1.0, 2), trajectory(1, 0.0, 2))


def learner(workers: Workers, **trainer: Any) -> Any:
    algorithm = {"use_kl_in_reward": True, "kl_ctrl": {"type": "doubling", "kl_coef": 1e-3}}
    config = Config.model_validate({"algorithm": algorithm, "trainer": {"critic_warmup": 2} | trainer})
    plan = make_plan(estimator=get_estimator("gae"), skips_rows_without_advantage=True)
    return make_run_state(config, [GROUP.prompt], workers, plan=plan, progress=Progress(kl_coef=1e-3))


@pytest.mark.parametrize(("step", "updates", "moves"), [(2, 1, False), (3, 2, True)])
def test_the_kl_controller_is_constant_during_critic_warmup(step: int, updates: int, moves: bool) -> None:
    workers = Workers()
    learned = asyncio.run(learn(learner(workers), step, [GROUP], Timer()))
    assert workers.updates == updates
    assert (learned.feedback.kl_coef != 1e-3) == moves


@pytest.mark.parametrize(("skipped", "coef"), [(0.0, 0.5), (1.0, None)])
def test_a_skipped_step_does_not_move_the_coefficient_of_ppo_kl(skipped: float, coef: float | None) -> None:
    class Updated(Workers):
        async def update(self, *arguments: Any) -> Any:
            _, *others = await super().update(*arguments)
            return {"actor/policy_kl": 0.0, "actor/steps_skipped": skipped}, *others

    run = learner(Updated())
    run.workers.critic = None
    run.config = replace_value(run.config, "actor_rollout_ref.actor.policy_loss.loss_mode", "ppo_kl")
    run.config = replace_value(run.config, "algorithm.adv_estimator", "grpo")
    assert asyncio.run(learn(run, 3, [GROUP], Timer())).feedback.policy_kl_coef == coef


def test_the_entropy_is_measured_every_so_many_iterations() -> None:
    workers = Workers()
    run = learner(workers)
    run.config = replace_value(run.config, "actor_rollout_ref.actor.entropy_freq", 4)
    measured = []
    for step in range(3, 9):
        asyncio.run(learn(run, step, [GROUP], Timer()))
        measured.append(workers.measures_entropy)
    assert measured == [False, True, False, False, False, True]


def test_non_finite_columns_end_the_run_or_skip_the_iteration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = r"iteration 3.*ref_logprobs are NaN.*on_bad_step=skip"
    with pytest.raises(FloatingPointError, match=facts):
        asyncio.run(learn(learner(NanReference()), 3, [GROUP], Timer()))
    monkeypatch.setattr("alphaapollo.trainer.step.learn.MAX_SKIPPED_STEPS", 3)
    workers = NanReference()
    run = learner(workers, on_bad_step="skip")
    for step in (3, 4):
        learned = asyncio.run(learn(run, step, [GROUP], Timer()))
        assert learned.metrics == {"batch/left_out": 1.0} and learned.feedback.kl_coef == 1e-3
        run.progress.complete_iteration(learned.feedback, {}, RecentGroups())
    notice = " ".join(capsys.readouterr().out.split())
    assert "step 4: " in notice and "ref_logprobs are NaN" in notice
    with pytest.raises(FloatingPointError, match=r"iteration 5, after 2 skipped"):
        asyncio.run(learn(run, 5, [GROUP], Timer()))
    assert workers.updates == 0


def test_rollout_log_probs_as_old_ones_need_no_forward_pass() -> None:
    class NoForwardPass(Workers):
        async def compute_log_probs(self, role: str = "policy") -> list[np.ndarray]:
            assert role == "reference", "the old log-probs are those of the engine"
            return await super().compute_log_probs(role)

        async def compute_values(self) -> list[np.ndarray]:
            return await super().compute_log_probs()

    workers = NoForwardPass()
    run = learner(workers)
    run.plan.uses_rollout_logprobs = True
    asyncio.run(learn(run, 3, [GROUP], Timer()))
    (rank,), (columns,) = workers.batches, workers.columns
    np.testing.assert_array_equal(columns.old_logprobs, rank.rows.rollout_logprobs)
    assert not workers.measures_mismatch


@pytest.mark.parametrize("is_known_before", [True, False])
def test_log_probs_and_advantages_of_each_sequence_are_logged(is_known_before: bool) -> None:
    run = learner(Workers())
    run.plan.needs_old_logprobs = is_known_before
    if not is_known_before:
        run.config = replace_value(run.config, "algorithm.use_kl_in_reward", False)
    learned = asyncio.run(learn(run, 3, [GROUP], Timer()))
    assert learned.batch and learned.credit
    rows = learned.list_trained_rows()
    assert [(row.prompt_id, row.sample, row.row) for row in rows] == [(0, 0, 0), (0, 1, 0)]
    advantages = np.concatenate([rank.advantages for rank in learned.credit.columns])  # one rank
    order = np.argsort(learned.batch.layout.row_order[0])
    for row, expected in zip(rows, [np.split(advantages, 2)[at] for at in order], strict=True):
        np.testing.assert_array_equal(row.advantages, expected)
        assert row.logprobs is not None and row.logprobs.tolist() == [-1.0 if is_known_before else -2.0] * 2
