from __future__ import annotations

from alphaapollo.observability.advice import WINDOW, Advisor

FINE = {
    "advantage/share_zero": 0.2,
    "groups/equal": 0.2,
    "reward/accuracy": 0.5,
    "rollout/entropy": 0.8,
    "outcome/grader_failed": 0.0,
    "response/truncated": 0.1,
    "end/time_limit": 0.0,
}


def told(*iterations: dict[str, float]) -> list[str]:
    advisor = Advisor()
    return [line for step, metrics in enumerate(iterations, start=1) for line in advisor.look(step, FINE | metrics)]


def test_a_healthy_run_is_told_nothing() -> None:
    assert told(*[{}] * 20) == []


def test_zero_signal_says_which_rewards_and_only_once() -> None:
    silent = {"advantage/share_zero": 1.0, "reward/min": 0.0, "reward/max": 0.0}
    lines = told(silent, silent, silent)
    assert len(lines) == 1
    assert lines[0].startswith("step 1: all rewards are 0: every advantage is 0, and the policy loss has no gradient.")
    (line,) = told(silent | {"reward/max": 1.0})
    assert "the samples of each prompt have equal rewards" in line


def test_shares_of_what_fails_are_told_with_their_number() -> None:
    for metrics, words in (
        ({"outcome/grader_failed": 0.44}, "44% of the trajectories have no reward because the grader failed"),
        ({"outcome/environment_failed": 0.5}, "50% of the trajectories have no reward because the environment failed"),
        ({"val/failed": 0.75}, "75% of the validation's samples failed (val/failed)"),
        ({"sync/probe_gap": 0.2}, "engine and trainer differ by 0.2 nats on average over the probe's tokens"),
        ({"actor/steps_skipped": 2.0}, "2 optimiser steps of the policy were left out"),
        ({"critic/steps_skipped": 1.0}, "1 optimiser steps of the critic were left out"),
        ({"actor/grad_norm": 0.0}, "the policy's gradient is exactly 0, though not every advantage is"),
        ({"end/time_limit": 0.001}, "0.1% of the episodes ended because their environment took over"),
        ({"response/truncated": 1.0}, "100% of the responses were cut by the token limit"),
    ):
        (line,) = told(metrics, metrics)
        assert words in line
    assert told({"outcome/grader_failed": 0.05, "val/failed": 0.05}) == []


def test_equal_groups_count_where_they_last_and_nothing_is_solved() -> None:
    equal = {"groups/equal": 0.9}
    assert told(*[equal] * (WINDOW - 1)) == []
    (line,) = told(*[equal] * (WINDOW + 3))
    assert line.startswith(f"step {WINDOW}: in 90% of the groups of the last {WINDOW} iterations")
    assert told(*[equal | {"reward/accuracy": 0.98}] * 20) == []


def test_an_entropy_that_collapsed_before_the_task_is_solved() -> None:
    settled = {"groups/equal": 0.6, "rollout/entropy": 0.05, "reward/accuracy": 0.45}
    (line,) = told(*[settled] * 20)
    assert "entropy 0.050 nats a token, 60% equal groups, at an accuracy of 0.45" in line
    assert told(*[settled | {"reward/accuracy": 0.97}] * 20) == []
