"""Algorithms with a state beside the weights resume bit for bit; TRPO and a selection of samples train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from alphaapollo.algorithms.kl import next_policy_kl_coef
from alphaapollo.config.schema import PolicyLossOptions
from tests.loop.conftest import Runner, Task

ACTOR = "actor_rollout_ref.actor"
LOCAL = ("trainer.controller=local", "actor_rollout_ref.rollout.name=hf", "data.val_files=", "trainer.export_hf=False")
ADAPTIVE = (
    *LOCAL,
    "algorithm.adv_estimator=reinforce",
    "algorithm.baseline_decay=0.5",
    f"{ACTOR}.policy_loss.loss_mode=ppo_kl",
    "trainer.save_freq=2",
)
TRPO = (
    *LOCAL,
    "algorithm=trpo",
    "env.rollout.n=4",
    f"{ACTOR}.optim.cg_steps=3",
    "algorithm.filtration.method=max_variance",
    "algorithm.filtration.size=2",
    "algorithm.filtration.baseline=all",
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.mode=reweight",
    "algorithm.filter_groups.metric=reward",
)


@pytest.fixture
def runner(task: Task, tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(task, tmp_path)
    yield runner
    runner.close()


def progress(folder: Path, step: int) -> dict[str, float]:
    return json.loads((folder / f"checkpoints/step_{step:06d}/progress.json").read_text())


def test_moving_baseline_and_penalty_resume_bit_for_bit(runner: Runner) -> None:
    whole = runner.run(*ADAPTIVE, "trainer.total_training_steps=4", name="whole")
    runner.run(*ADAPTIVE, "trainer.total_training_steps=2", name="parts")
    parts = runner.run(*ADAPTIVE, "trainer.total_training_steps=4", name="parts")
    lines = [[line for line in run.metrics if line["step"]] for run in (whole, parts)]
    for one, other in zip(*lines, strict=True):
        names = [name for name in one if name.startswith(("actor/", "critic/")) and name != "actor/lr"]
        assert "actor/policy_kl" in names and {n: one[n] for n in names} == {n: other[n] for n in names}
    saved = [progress(whole.folder, step) for step in (2, 4)]
    assert saved == [progress(parts.folder, step) for step in (2, 4)]
    for line, following in pairwise(lines[0]):
        coef = next_policy_kl_coef(PolicyLossOptions(), line["actor/policy_kl_coef"], line["actor/policy_kl"])
        assert following["actor/policy_kl_coef"] == coef
    assert saved[0]["policy_kl_coef"] == lines[0][2]["actor/policy_kl_coef"] != 1.0
    assert 0 < saved[0]["baseline"] != saved[1]["baseline"]


def test_trust_region_steps_on_selected_samples(runner: Runner) -> None:
    done = runner.run(*TRPO)
    lines = [line for line in done.metrics if line["step"]]
    for line in lines:
        assert line["batch/trajectories"] <= 8 and line["batch/lost"] == 0.0
        assert line["actor/optimizer_steps"] == 1.0
        assert 0 < line["trpo/kl"] <= 0.01 or line["trpo/rejected"] == 1.0
        assert line["sync/probe_gap"] < 5e-5
    assert any(line["trpo/improvement"] > 0 for line in lines)
