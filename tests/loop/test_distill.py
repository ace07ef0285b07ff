"""On-policy distillation without a reward, synchronous, asynchronous and replayed; and a teacher with another
tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples.quickstart.make_task import make_model, make_tokenizer
from tests.loop.conftest import ROOT, Runner
from tests.loop.warm import Program

pytestmark = [pytest.mark.loop, pytest.mark.timeout(400)]

LOCAL = "trainer.controller=local"
UNREWARDED = "custom_reward_function.path="  # the task has no built-in grader either


def make_teacher(folder: Path, more_words: tuple[str, ...] = ()) -> Path:
    make_tokenizer(folder, more_words)
    make_model(folder, seed=1)
    return folder


def test_student_approaches_teacher_without_a_reward(ppo: Runner, tmp_path: Path) -> None:
    teacher = f"teacher.model.path={make_teacher(tmp_path / 'teacher')}"
    shared = (LOCAL, UNREWARDED, "algorithm=distill", "algorithm.adv_estimator=none", teacher, "env.rollout.n=4")
    done = ppo.run(*shared, "trainer.record_steps=[2]", "trainer.total_training_steps=3", name="whole")
    lines = [line for line in done.metrics if "actor/loss" in line]
    distances = [line["distill/reverse_kl"] for line in lines]
    assert distances[0] > distances[1] > distances[2] > 0
    assert all(line["distill/divergence"] == pytest.approx(line["distill/reverse_kl"], rel=1e-4) for line in lines)
    assert all(line["critic/score/mean"] == 0 for line in lines)
    assert "1 x reverse, from" in done.output and "nothing gives a reward" in " ".join(done.output.split())

    words = [str(done.folder / "recorded/step_000002")]
    replay = Program(
        "alphaapollo.trainer.replay.__main__", words, tmp_path / "replay.txt", dict(os.environ), ROOT, warm=True
    )
    assert replay.wait(120) == 0, replay.printed[-4000:]

    behind = ("trainer.async_mode=carry", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis")
    done = ppo.run(*shared, *behind, "teacher.divergence=sampled", "trainer.total_training_steps=3", name="sampled")
    assert all(line["actor/grad_norm"] > 0 for line in done.metrics if "actor/loss" in line)
    assert all(0 < line["distill/agreement"] < 1 for line in done.metrics if "actor/loss" in line)


def test_teacher_with_another_tokenizer_is_refused(ppo: Runner, tmp_path: Path) -> None:
    """A teacher with more tokens works with teacher.divergence=sampled."""
    teacher = f"teacher.model.path={make_teacher(tmp_path / 'teacher', ('<left>',))}"
    done = ppo.refuse("algorithm=distill", teacher)
    assert "has tokens that the policy lacks: '<left>'" in done.output
    assert "Set teacher.divergence=sampled" in done.output
    ppo.run(LOCAL, "algorithm=distill", teacher, "teacher.divergence=sampled", "trainer.dry_run=true")
