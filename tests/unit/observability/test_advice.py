from __future__ import annotations

import json
from pathlib import Path

import pytest

from alphaapollo.observability.advice import CALM, WINDOW, MetricsAdvisor

FINE = {
    "critic/score/mean": 0.5,
    "critic/score/std": 0.5,
    "sync/probe_moved": 1e-4,
    "actor/optimizer_steps": 4.0,
    "actor/lr": 1e-6,
    "actor/grad_norm": 0.3,
    "critic/advantages/share_zero": 0.2,
    "groups/zero_variance": 0.2,
    "reward/accuracy": 0.5,
    "rollout/entropy": 0.8,
    "outcome/grader_failed": 0.0,
    "response_length/clip_ratio": 0.1,
    "end/time_limit": 0.0,
}


def warnings_of(*iterations: dict[str, float]) -> list[str]:
    advisor = MetricsAdvisor()
    steps = enumerate(iterations, start=1)
    return [line for step, metrics in steps for line in advisor.list_warnings(step, FINE | metrics)]


def test_the_reason_of_a_failure_is_shown() -> None:
    failing = FINE | {"outcome/grader_failed": 0.28}
    (line,) = MetricsAdvisor().list_warnings(1, failing, "KeyError: 'x' (reward.py, line 2)")
    assert "28% " in line and "grader" in line and "KeyError: 'x' (reward.py, line 2)" in line


@pytest.mark.parametrize(
    ("metrics", "facts"),
    [
        ({"sampling/z": 6.2}, ["6 standard deviations", "more probable"]),
        ({"sampling/run_z": -7.0}, ["7 standard deviations", "less probable"]),
        ({"sampling/repetition_z": 9.0}, ["repeat each other", "seeds"]),
        ({"critic/advantages/share_zero": 1.0}, ["equal rewards", "advantage", "0"]),
        ({"outcome/grader_failed": 0.44}, ["44% of the trajectories", "grader"]),
        ({"val/failed": 0.75}, ["75% of the validation samples", "(val/failed)"]),
        ({"sync/probe_gap": 0.2}, ["probe", "0.2 nats"]),
        ({"actor/steps_skipped": 2.0}, ["2 optimizer steps", "gradient", "(actor/steps_skipped)"]),
        ({"actor/grad_norm": 0.0, "groups/zero_variance": 0.5}, ["policy's gradient is exactly 0"]),
        ({"end/time_limit": 0.001}, ["0.1% of the episodes", "env.episode_timeout"]),
        ({"response_length/clip_ratio": 1.0}, ["100% of the responses", "truncated"]),
        ({"mismatch/k3": 0.02}, ["engine and trainer", "KL 2.0e-02", "1e-02", "effective"]),
        ({"mismatch/ess": 0.5}, ["sample size 50%", "80%", "algorithm.rollout_correction.method=tis"]),
        ({"mismatch/k3": float("nan")}, ["KL nan"]),
        ({"mismatch/k3": 0.02, "staleness/max": 1.0}, ["KL 2.0e-02", "trainer.max_staleness"]),
    ],
)
def test_a_problem_is_reported_once_with_its_numbers(metrics: dict[str, float], facts: list[str]) -> None:
    (line,) = warnings_of(metrics, metrics, metrics)
    assert line.startswith("step 1: ")
    assert [fact for fact in facts if fact not in line] == [], line


def test_a_policy_that_an_update_destroyed_gets_no_advice_about_lengths() -> None:
    after = {"response_length/clip_ratio": 1.0, "critic/advantages/share_zero": 1.0}
    (line,) = warnings_of({"sync/probe_moved": 20.6, "actor/lr": 1e-2}, after, *[SETTLED | after] * 20)
    assert line.startswith("step 1: ") and "20.6 nats" in line and "actor.optim.lr" in line and "1.0e-02" in line
    (line,) = warnings_of({}, {"response_length/clip_ratio": 1.0, "critic/score/mean": 0.1})
    assert "10%" in line and "1.0e-06" in line and "max_response_length" not in line
    (line,) = warnings_of({}, {"response_length/clip_ratio": 1.0, "critic/score/mean": 0.6})  # answers became longer
    assert "max_response_length" in line


EQUAL = {"groups/zero_variance": 0.9}
SETTLED = {"groups/zero_variance": 0.6, "rollout/entropy": 0.05, "reward/accuracy": 0.45}


@pytest.mark.parametrize(
    "iterations",
    [
        [{}] * 20,
        [{"outcome/grader_failed": 0.05, "val/failed": 0.05}],
        [EQUAL] * (WINDOW - 1),
        [EQUAL | {"reward/accuracy": 0.98}] * 20,
        [{}, *[SETTLED | {"reward/accuracy": 0.97}] * 20],  # the task is solved
        [{"rollout/entropy": 0.09}, *[SETTLED | {"reward/accuracy": 0.0}] * 20],  # the entropy is low from the start
    ],
)
def test_healthy_runs_get_no_warning(iterations: list[dict[str, float]]) -> None:
    assert warnings_of(*iterations) == []


def test_zero_variance_groups_are_reported_if_they_persist() -> None:
    (line,) = warnings_of(*[EQUAL] * (WINDOW + 3))
    assert line.startswith(f"step {WINDOW}: 90% of the groups")


def test_zero_variance_is_not_reported_without_advantages() -> None:
    taught = {name: value for name, value in FINE.items() if not name.startswith("critic/advantages/")}
    taught["groups/zero_variance"] = 1.0
    advisor = MetricsAdvisor()
    assert [line for step in range(WINDOW) for line in advisor.list_warnings(step, taught)] == []
    still = taught | {"sync/probe_moved": 0.0}
    lines = [line for step in range(WINDOW, 2 * WINDOW) for line in advisor.list_warnings(step, still)]
    assert len(lines) == 1 and "the policy does not change" in lines[0]


def test_entropy_collapse_before_the_task_is_solved() -> None:
    (line,) = warnings_of({"rollout/entropy": 0.11}, *[SETTLED] * 20)
    assert [fact for fact in ("0.050 nats", "60% groups", "accuracy 0.45") if fact not in line] == []


def test_accuracy_that_falls_while_the_reward_rises_is_reported() -> None:
    def line(step: int, accuracy: float, rise: float = 0.1) -> dict[str, float]:
        return {"critic/score/mean": 1.0 + rise * step, "reward/accuracy": accuracy}

    (text,) = warnings_of(*[line(step, 0.7 if step < WINDOW else 0.2) for step in range(2 * WINDOW)])
    assert text.startswith("step 10: accuracy") and "to 0.20 from 0.70" in text
    assert warnings_of(*[line(step, 0.7 - 0.4 * (step % 2)) for step in range(20)]) == []  # accuracy is noisy
    assert warnings_of(*[line(step, 0.7 if step < WINDOW else 0.5) for step in range(20)]) == []
    assert warnings_of(*[line(step, 0.7 if step < WINDOW else 0.2, rise=-0.01) for step in range(20)]) == []


def test_returning_cause_is_reported_again() -> None:
    failing, fine = {"outcome/grader_failed": 0.5}, dict[str, float]()
    steps = [line.split(":")[0] for line in warnings_of(failing, *[fine] * CALM, failing, failing, *[fine] * CALM)]
    assert steps == ["step 1", f"step {CALM + 2}"]
    assert len(warnings_of(failing, *[fine] * (CALM - 1), failing)) == 1


def rewards(*means: float, std: float = 0.0) -> list[dict[str, float]]:
    return [{"critic/score/mean": mean, "critic/score/std": std} for mean in means]


def test_reward_collapse_is_reported_with_both_means() -> None:
    (line,) = warnings_of(*rewards(*[0.7, 0.8] * 5), *rewards(*[0.1] * 20))
    assert line.startswith("step 15: the reward has collapsed: 0.1 ") and " 5 iterations" in line and "0.76" in line
    (line,) = warnings_of(*rewards(*[-0.1, -0.2] * 5, std=0.3), *rewards(*[-0.9] * 20, std=0.3))
    assert "the reward has collapsed" in line


@pytest.mark.parametrize(
    ("means", "std"),
    [
        ([0.1, 0.3, 0.5, 0.7, 0.9] * 4, 0.4),  # it fluctuates
        ([0.9] * 10 + [0.6] * 20, 0.3),  # worse, and no collapse
        ([0.02, 0.0, 0.05, 0.0, 0.03, 0.0, 0.0, 0.01, 0.0, 0.0, 0.02], 0.14),  # rarely any
        ([0.05] * 10 + [-0.05] * 10, 1.0),  # around zero
        ([0.0] * 10 + [0.8] * 20, 0.4),  # it rises
    ],
)
def test_noise_is_not_reported_as_a_collapse(means: list[float], std: float) -> None:
    assert warnings_of(*rewards(*means, std=std)) == []


def test_unchanged_policy_is_reported_with_its_learning_rate() -> None:
    still = {"sync/probe_moved": 2e-8, "actor/lr": 1e-12}
    (line,) = warnings_of(*[still] * 12)
    assert line.startswith(f"step {WINDOW}: the policy does not change")
    assert "2.0e-08 nats" in line and "1.0e-12" in line


@pytest.mark.parametrize(
    "fine",
    [
        {"critic/advantages/share_zero": 1.0, "critic/score/max": 1.0},  # reported as zero advantages
        {"actor/optimizer_steps": 0.0},  # the critic alone is trained
        {"actor/optimizer_steps": 4.0, "actor/steps_skipped": 4.0},
    ],
)
def test_policy_change_is_not_expected_without_steps_and_during_warm_up(fine: dict[str, float]) -> None:
    assert warnings_of(*({"sync/probe_moved": 1e-7, "actor/lr": step * 1e-9} for step in range(1, 20))) == []
    assert not [line for line in warnings_of(*[{"sync/probe_moved": 0.0} | fine] * 12) if "does not change" in line]


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parent / "histories").glob("*.jsonl")), ids=lambda file: file.stem
)
def test_recorded_good_runs_get_no_warning(file: Path) -> None:
    """Recorded metrics of gallery runs that ended between .94 and .99, reduced to those that the rules use."""
    advisor = MetricsAdvisor()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) >= 20 and lines[-1]["reward/accuracy"] > 0.9
    assert [text for line in lines for text in advisor.list_warnings(line["step"], line)] == []
