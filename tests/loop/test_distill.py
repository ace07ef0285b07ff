"""On-policy distillation without a reward, synchronous, asynchronous and replayed. tests/unit/session/test_teachers.py
has a teacher behind a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.quickstart.make_task import make_model, make_tokenizer
from tests.loop.replays import equal_lines, recording, replay
from tests.loop.stack import StackRunner

UNREWARDED = "custom_reward_function.path="  # the task has no built-in grader either


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "teacher")
    make_model(tmp_path / "teacher", seed=1)
    return tmp_path / "teacher"


@pytest.mark.core
def test_student_approaches_teacher_without_a_reward(stack: StackRunner, teacher: Path) -> None:
    shared = (
        *(UNREWARDED, "algorithm=distill", "algorithm.adv_estimator=none", f"teacher.model.path={teacher}"),
        *("env.rollout.n=4", "trainer.total_training_steps=3"),
    )
    done = stack.run(*shared, "trainer.record_steps=[2]", name="whole")
    lines = done.metrics[1:]
    distances = [line["distill/reverse_kl"] for line in lines]
    assert distances[0] > distances[1] > distances[2] > 0
    assert all(line["distill/divergence"] == pytest.approx(line["distill/reverse_kl"], rel=1e-4) for line in lines)
    assert all(line["critic/score/mean"] == 0 for line in lines)
    assert "divergence" in done.output and "nothing gives a reward" in " ".join(done.output.split())
    assert equal_lines(replay(stack, recording(done, 2))) > 40

    behind = ("trainer.async_mode=carry", "trainer.max_staleness=1", "algorithm.rollout_correction.method=tis")
    done = stack.run(*shared, *behind, "teacher.divergence=sampled", name="sampled")
    assert all(line["actor/grad_norm"] > 0 and 0 < line["distill/agreement"] < 1 for line in done.metrics[1:])
