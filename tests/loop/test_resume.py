"""Interrupted and resumed runs equal uninterrupted ones bit for bit, with all that a run keeps beside its weights."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pandas as pd
import pytest

from alphaapollo.algorithms.adaptive_coefficients import next_policy_kl_coef
from alphaapollo.config.schema import PolicyLossOptions
from tests.loop.conftest import FinishedRun, Runner
from tests.loop.replays import check_equal_runs
from tests.loop.stack import StackRunner

LOCAL = "trainer.controller=local"
ALGORITHM, ACTOR = "algorithm", "actor_rollout_ref.actor"
SOURCES = ("first", "second", "third")
STAGES = (
    "{data_source: first, threshold: 0.01}",
    "{data_source: second, metric: val/accuracy, threshold: 0}",
    "{data_source: third}",
)
EVERYTHING = (  # each row sets fields of Progress
    *("trainer.save_freq=2", "trainer.test_freq=2", "trainer.max_ckpt_to_keep=1", "trainer.keep_best=val/accuracy"),
    *(f"{ACTOR}.policy_loss.loss_mode=ppo_kl", f"{ALGORITHM}.rollout_correction.method=tis"),
    *(f"{ALGORITHM}.use_kl_in_reward=True", f"{ALGORITHM}.kl_ctrl.type=adaptive", f"{ALGORITHM}.kl_ctrl.kl_coef=0.1"),
    *(f"{ALGORITHM}.reference_reset.every=2", f"{ALGORITHM}.reference_reset.patience=9"),
    *(f"{ALGORITHM}.filter_groups.enable=True", f"{ALGORITHM}.filter_groups.metric=reward"),
    *("data.sampler=frontier", "data.curriculum.revisit_rate=0.01", f"data.curriculum.stages=[{','.join(STAGES)}]"),
    "data.reuse.groups=2",
)
TWO, FOUR = "trainer.total_training_steps=2", "trainer.total_training_steps=4"


def read_progress(run: FinishedRun, step: int = 4) -> dict[str, Any]:
    return json.loads((run.folder / f"checkpoints/step_{step:06d}/progress.json").read_text())


@pytest.fixture
def staged(stack: StackRunner) -> str:
    """Setting of training data from three sources."""
    frame = pd.read_parquet(stack.task.data / "train.parquet")
    frame["data_source"] = [SOURCES[index % 3] for index in range(len(frame))]
    frame.to_parquet(stack.out / "train.parquet")
    return f"data.train_files={stack.out / 'train.parquet'}"


def test_all_progress_is_resumed_and_zero_staleness_equals_synchronous(
    stack: StackRunner, ppo: Runner, staged: str
) -> None:
    settings, not_late = (*EVERYTHING, staged), "trainer.max_staleness=0"
    whole = stack.run(*settings, FOUR, name="whole")
    carry = stack.run(*settings, FOUR, "trainer.async_mode=carry", not_late, name="carry")
    separate = (*settings, "trainer.async_mode=separate", not_late)
    stack.run(*separate, TWO, name="parts")
    parts = ppo.run(*separate, FOUR, LOCAL, name="parts")
    assert "resumed from" in parts.output
    for run in (carry, parts):
        check_equal_runs(whole, run)
        assert read_progress(run) == read_progress(whole)
    check_controllers(whole)
    check_resets_and_best_checkpoint(whole, parts)
    check_stages(parts)
    assert parts.metrics[-1]["reuse/groups"] > 0 and parts.metrics[-1]["curriculum/observed"] > 0


def check_controllers(run: FinishedRun) -> None:
    """Coefficients follow from the iteration before."""
    lines, saved = run.metrics[1:], read_progress(run)
    for line, following in pairwise(lines):
        coef = next_policy_kl_coef(PolicyLossOptions(), line["actor/policy_kl_coef"], line["actor/policy_kl"])
        assert following["actor/policy_kl_coef"] == coef
    assert len({line["actor/reward_kl_penalty_coeff"] for line in lines}) == 4
    assert saved["policy_kl_coef"] != 1.0 and saved["kl_coef"] != 0.1


def check_resets_and_best_checkpoint(whole: FinishedRun, parts: FinishedRun) -> None:
    """ProRL: one reset before the checkpoint that the run resumes from, and one after it."""
    assert [line["reference/resets"] for line in whole.metrics[1:]] == [0, 1, 1, 2]
    distances = [line["actor/reward_kl_penalty_per_sequence"] for line in whole.metrics[1:]]
    assert distances[2] < distances[1]
    best = max((2, 4), key=lambda step: (whole.metrics[step]["val/accuracy"], step))
    for run in (whole, parts):
        kept = {path.name for path in (run.folder / "checkpoints").glob("step_*")}
        assert kept == {f"step_{step:06d}" for step in (best, 4)}
        assert f"val/accuracy is best in {run.folder}/checkpoints/step_{best:06d}" in " ".join(run.output.split())


def check_stages(run: FinishedRun) -> None:
    """Stages open at their gates and stay open. Prompts are drawn from open stages only."""
    opened = [line["curriculum/stage"] for line in run.metrics[1:]]
    assert opened[0] in (1, 2) and opened[-1] == 3 and opened == sorted(opened)
    for step, number in enumerate([1, *opened[:-1]], 1):
        drawn = {record["data_source"] for record in run.rollouts(step)}
        assert drawn <= set(SOURCES[: int(number)]), (step, drawn)


@pytest.mark.core
def test_adapters_and_a_moving_baseline_are_resumed(stack: StackRunner, ppo: Runner) -> None:
    """With LoRA, the reference needs no second model."""
    settings = (
        *("actor_rollout_ref.model.lora_rank=4", f"{ALGORITHM}.adv_estimator=reinforce"),
        *(f"{ALGORITHM}.baseline_decay=0.5", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"),
        *(f"{ACTOR}.optim.lr=1e-2", "trainer.save_freq=1"),
    )
    whole = stack.run(*settings, name="whole")
    stack.run(*settings, "trainer.total_training_steps=1", name="parts")
    parts = ppo.run(*settings, LOCAL, name="parts")
    said = " ".join(parts.output.split())  # the plan's lines are folded
    assert "resumed from" in said and "LoRA of rank 4, alpha 16, on all-linear" in said
    check_equal_runs(whole, parts)
    assert all(line["sync/probe_gap"] < 5e-5 for line in whole.metrics)
    assert whole.metrics[-1]["actor/ref_kl"] > 0
    baselines = [[read_progress(run, step)["baseline"] for step in (1, 2)] for run in (whole, parts)]
    assert baselines[0] == baselines[1] and 0 < baselines[0][0] != baselines[0][1]
