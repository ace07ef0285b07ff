from __future__ import annotations

import math
from pathlib import Path

import pytest

from alphaapollo.config.schema import Config, Trainer
from alphaapollo.session.progress import EarlyStopping, Progress, TrainingGoal


def test_epochs_end_with_the_last_full_batch() -> None:
    goal = TrainingGoal.from_settings(Trainer(total_epochs=2), num_prompts=10, batch_size=4)
    assert goal == TrainingGoal(5, max_prompts=20)
    short = TrainingGoal.from_settings(Trainer(total_epochs=1), num_prompts=3, batch_size=4)
    assert short == TrainingGoal(1, max_prompts=4)  # one iteration at least
    assert TrainingGoal.from_settings(Trainer(total_training_steps=7, total_epochs=2), 10, 4) == TrainingGoal(7)


def test_given_iterations_override_epochs() -> None:
    goal = TrainingGoal.from_settings(Trainer(total_training_steps=3), num_prompts=10, batch_size=4)
    assert not goal.is_reached(Progress(step=2, prompts_consumed=800))
    assert goal.is_reached(Progress(step=3))


def test_each_role_counts_its_own_optimizer_steps() -> None:
    config = Config.model_validate(
        {
            "data": {"train_batch_size": 8},
            "env": {"rollout": {"n": 4}},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 16, "ppo_epochs": 1}},
            "critic": {"ppo_epochs": 4},
            "trainer": {"critic_warmup": 10},
        }
    )
    assert config.count_policy_optimizer_steps(100) == 90 * 2  # 32 trajectories are 2 mini-batches; none in the warm-up
    assert config.count_critic_optimizer_steps(100) == 100 * 2 * 4
    assert config.count_policy_optimizer_steps(5) == 0


@pytest.mark.parametrize(
    ("metric", "threshold", "values", "end"),
    [
        ("val/accuracy", 0.0, [0.2, 0.4, 0.4, 0.3, 0.9], 4),  # a tie is no improvement
        ("val/accuracy", 0.15, [0.2, 0.3, 0.34, 0.9], 3),  # small ones do not count, and add up
        ("val/accuracy", 0.15, [0.2, 0.3, 0.36, 0.3], None),
        ("val/loss", 0.0, [3.0, 2.0, 2.5, 1.9, 1.9], None),
        ("val/loss", 0.0, [2.0, math.nan, 2.1, 1.0], 3),
        ("val/accuracy", 0.0, [None, None, 0.1, None, 0.1, 0.1], 6),  # iterations that did not validate
    ],
)
def test_early_stopping(metric: str, threshold: float, values: list[float | None], end: int | None, tmp_path: Path):
    trainer = {"early_stopping_metric": metric, "early_stopping_patience": 2, "early_stopping_threshold": threshold}
    settings = Config.model_validate({"trainer": {**trainer, "total_training_steps": 9}}).trainer
    goal, progress = TrainingGoal.from_settings(settings, 10, 4), Progress()
    for progress.step, value in enumerate(values, start=1):
        goal.early_stopping.observe(progress, {} if value is None else {metric: value})
        if goal.is_reached(progress):
            break
        progress.write(tmp_path)
        progress = Progress.read(tmp_path)  # a run that resumes here ends at the same iteration
    assert goal.is_reached(progress) == (end is not None) and progress.step == (end or len(values))
    assert (f"2 validations have not improved {metric}" in goal.describe_early_end(progress)) == (end is not None)


def test_early_stopping_needs_its_metric() -> None:
    stopping, progress = EarlyStopping("val/acc"), Progress()
    stopping.observe(progress, {"val/failed": 1.0})  # no sample has a score yet
    with pytest.raises(ValueError, match=r"early_stopping_metric=val/acc is not a metric .* one of val/accuracy\."):
        stopping.observe(progress, {"val/accuracy": 0.5})


def test_stop_at_step_is_not_the_end_of_the_schedule() -> None:
    settings = Config.model_validate({"trainer": {"total_training_steps": 9, "stop_at_step": 3}}).trainer
    goal = TrainingGoal.from_settings(settings, 10, 4)
    assert (goal.max_steps, goal.is_reached(Progress(step=2)), goal.is_reached(Progress(step=3))) == (9, False, True)
    assert goal.describe_early_end(Progress(step=3)) == "the run ended after 3 of 9 iterations: trainer.stop_at_step=3"
    assert goal.describe_early_end(Progress(step=9)) == ""


def test_another_metric_starts_to_count_again() -> None:
    progress, loss = Progress(), EarlyStopping("val/loss", patience=2)
    for value in (2.0, 2.1, 2.2):
        loss.observe(progress, {"val/loss": value})
    accuracy = EarlyStopping("val/accuracy", patience=2)
    assert loss.is_reached(progress) and not accuracy.is_reached(progress)
    accuracy.observe(progress, {"val/accuracy": 0.5})
    assert (progress.best_value, progress.validations_without_improvement) == (0.5, 0)
